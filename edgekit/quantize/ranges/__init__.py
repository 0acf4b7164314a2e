"""From statistics to ranges: minmax, percentile, mse, entropy."""
