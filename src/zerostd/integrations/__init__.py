"""Training loops of other libraries with zerostd inside: one file for each, on public names of zerostd alone."""
