"""Measure the chosen parts, and write the record and the table."""

from experiments.tables.linear_on_the_fabric.report import main

if __name__ == "__main__":
    main()
