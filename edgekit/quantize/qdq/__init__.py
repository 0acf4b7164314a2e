"""The quantized graph written: Q and DQ nodes, compact forms, QOperator form."""
