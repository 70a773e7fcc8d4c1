"""What fills the slots of a method: one folder a slot."""

__all__: list[str] = []
