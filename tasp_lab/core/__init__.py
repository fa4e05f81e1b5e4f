"""What every package uses: units, errors, arrays, files, tables and progress."""
