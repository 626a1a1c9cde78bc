"""When things move: hooks on the user's modules, gathering ahead, reducing behind."""
