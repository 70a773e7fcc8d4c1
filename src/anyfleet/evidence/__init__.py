"""Evidence: the tables and figures of the papers as recipes, what came of them, and verdicts.

    item = read_item(Path("recipes/thesis/table_3_1.toml"))
    found = read_results(Path("evidence/thesis/table_3_1.json.gz"))
    for verdict in verdicts(item, found):
        print(verdict)

`anyfleet reproduce` plays the runs of an item and writes its result file; docs/evidence.md is made
from items and result files alone.
"""

from anyfleet.evidence.items import Case, Claim, Item, read_item

__all__ = ["Case", "Claim", "Item", "read_item"]
