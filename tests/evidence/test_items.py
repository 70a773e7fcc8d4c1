from pathlib import Path

import pytest

from anyfleet.errors import ConfigError
from anyfleet.evidence.items import digest, read_item

ITEM = """
title = "FedProx is no worse than FedAvg"
where = "Table 9"
paper = { rounds = 3, devices = 4, seeds = 2 }
seeds = 2
measures = ["rounds", "best"]

[run]
rounds = 3
evaluate_every = 1
task = { use = "Embedded", devices = 4, limit = 200, server = 20, model = { use = "logistic" } }

[cases."even"]
target = 0.3
paper.rounds = { FedAvg = 3, FedProx = "not reached" }

[cases."skewed"]
target = 0.2
run = { task = { partition = { use = "Dirichlet", alpha = 0.3 } } }

[methods.FedAvg]
method = { use = "fedavg", lr = 0.1 }

[methods.FedProx]
method = { use = "fedprox", lr = 0.1, mu = 0.1 }
cases = ["skewed"]

[[claims]]
text = "FedProx is faster."
better = "FedProx"
than = ["FedAvg"]
by = "rounds"
cases = ["skewed"]

[quick]
rounds = 1
"""


def write(folder: Path, text: str = ITEM) -> Path:
    file = folder / "papers" / "table_9.toml"
    file.parent.mkdir()
    file.write_text(text)
    return file


def test_an_item_is_cases_and_methods_laid_over_a_run(tmp_path: Path) -> None:
    item = read_item(write(tmp_path))
    assert item.name == "papers/table_9"
    assert [(case.name, column.name) for case, column in item.pairs()] == [
        ("even", "FedAvg"),
        ("skewed", "FedAvg"),
        ("skewed", "FedProx"),
    ]
    assert item.cases["even"].paper["rounds"] == {"FedAvg": 3.0, "FedProx": None}
    made = item.experiments()
    assert {key: each.rounds for key, each in made.items()} == dict.fromkeys(made, 3)
    assert type(made["even", "FedAvg"].task.partition).__name__ == "Iid"  # type: ignore[attr-defined]
    assert type(made["skewed", "FedAvg"].task.partition).__name__ == "Dirichlet"  # type: ignore[attr-defined]
    small = item.experiments(quick=True)
    assert {each.rounds for each in small.values()} == {1}
    assert digest(made["even", "FedAvg"]) != digest(small["even", "FedAvg"])
    assert digest(made["even", "FedAvg"]) != digest(made["skewed", "FedAvg"])


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('measures = ["rounds", "best"]', 'measures = ["hours"]', "'hours' is no measure"),
        ("target = 0.3\n", "", "needs a `target`"),
        ('better = "FedProx"', 'better = "FedNone"', "'FedNone' is none of the methods"),
        ('cases = ["skewed"]\n\n[[claims]]', 'cases = ["odd"]\n\n[[claims]]', "no case 'odd'"),
        ('"not reached"', '"never"', "must be a number or 'not reached'"),
        ("seeds = 2\nmeasures", "seeds = 0\nmeasures", "is not an item"),
        ("[quick]", "[quicker]", "quicker"),
        ('by = "rounds"', 'by = "rounds"\nmore_than = "best"', "compares gains of scores"),
        ('by = "rounds"', 'by = "rounds"\nwithin = 0.02', "a difference of scores"),
        ('by = "rounds"', 'by = "rounds"\ngroups = ["a", "b"]', "there is no group 'a'"),
        ("mu = 0.1 }", 'mu = 0.1 }\nbest = { key = "method.mu" }', "values"),
        ("mu = 0.1 }", 'mu = 0.1 }\nstands_for = "FedAvg"', "only an experiment"),
    ],
)
def test_what_is_wrong_with_an_item_is_told(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in ITEM
    file = write(tmp_path, ITEM.replace(old, new))
    with pytest.raises(ConfigError, match=r"table_9\.toml") as error:
        read_item(file)
    assert told in str(error.value)


def test_problems_of_all_experiments_are_told_at_once(tmp_path: Path) -> None:
    text = ITEM.replace("mu = 0.1", "mu = -1.0").replace("alpha = 0.3", "alfa = 0.3")
    item = read_item(write(tmp_path, text))
    with pytest.raises(ConfigError) as error:
        item.experiments()
    assert "skewed, FedAvg" in str(error.value)
    assert "skewed, FedProx" in str(error.value)
    assert "alfa" in str(error.value)


def test_a_claim_may_be_made_for_each_case(tmp_path: Path) -> None:
    text = ITEM.replace('cases = ["skewed"]\n\n[[claims]]', "\n[[claims]]").replace(
        'by = "rounds"\ncases = ["skewed"]', 'by = "rounds"\neach = true'
    )
    claims = read_item(write(tmp_path, text)).claims
    assert [(claim.text, claim.cases) for claim in claims] == [
        ("FedProx is faster: even.", ("even",)),
        ("FedProx is faster: skewed.", ("skewed",)),
    ]


def test_a_paper_may_not_say_how_many_rounds_it_had(tmp_path: Path) -> None:
    text = ITEM.replace("paper = { rounds = 3, devices", "paper = { devices")
    assert read_item(write(tmp_path, text)).paper.rounds is None


def test_the_best_of_several_settings_is_several_methods_of_one_name(tmp_path: Path) -> None:
    text = ITEM.replace(", mu = 0.1 }", ' }\nbest = { key = "method.mu", values = [0.1, 1] }')
    item = read_item(write(tmp_path, text))
    assert item.columns == ("FedAvg", "FedProx")
    assert item.best == {"FedProx": ("FedProx, mu=0.1", "FedProx, mu=1")}
    made = item.experiments()
    assert [method for case, method in made if case == "skewed"] == [
        "FedAvg",
        *item.best["FedProx"],
    ]
    assert len({digest(each) for each in made.values()}) == len(made)


def test_the_comment_at_the_head_says_what_an_item_is_about(tmp_path: Path) -> None:
    head = "# anyfleet reproduce papers/table_9\n#\n# Two lines\n# of it.\n#\n# And more.\n"
    assert read_item(write(tmp_path, head + ITEM)).about == "Two lines\nof it.\n\nAnd more."
