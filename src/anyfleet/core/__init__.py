"""The loop and all that it needs: messages, planning, server, client, clock and ledger."""

__all__: list[str] = []
