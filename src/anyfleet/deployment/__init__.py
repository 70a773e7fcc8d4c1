"""A fleet of real devices, seen from its server: who belongs to it, and what carries its messages.

A fleet lives in a folder (`fleet_folder`): certificates, the roster of enrolled devices, and what
every device gets. While it is served, Flower's SuperLink (`superlink`) runs on loopback behind the
gate (`gate`), which is all that the network sees. `preflight` checks all of that beforehand.

The modules need what `pip install anyfleet[fleet]` brings, and are imported one by one.
"""

__all__: list[str] = []
