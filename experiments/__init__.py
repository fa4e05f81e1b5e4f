"""What tasp-lab was built to find out. Run by hand; the results are committed with the machine that made them."""
