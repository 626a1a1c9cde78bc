"""When things move: hooks on the user's modules, gathering before use, reducing after it."""
