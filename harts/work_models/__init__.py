"""What a microbatch costs: the measure in which partitions are searched and slots balanced."""
