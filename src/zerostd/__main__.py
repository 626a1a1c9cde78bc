"""`python -m zerostd` is the program `zerostd`."""

from zerostd.cli.main import app

if __name__ == "__main__":
    app(prog_name="zerostd")
