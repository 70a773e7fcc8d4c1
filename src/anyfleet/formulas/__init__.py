"""The formulas of the methods: pure functions of numpy arrays, each naming its section of METHODS.

Nothing here draws random numbers: what is random takes uniforms. What trains models uses tensors
and is tested against these.
"""

__all__: list[str] = []
