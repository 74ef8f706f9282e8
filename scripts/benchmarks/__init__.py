"""What the benchmarks share: protocol, records, roofs, systems, cells."""
