"""What a finished run tells: summaries, equal budgets, breakdowns, diagnosis, plots."""

__all__: list[str] = []
