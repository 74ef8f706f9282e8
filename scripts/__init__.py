"""Makes `scripts.benchmarks` a package of this checkout, whatever else is called scripts."""
