"""The ORT format: reads and writes its tables, brings its bytes into canonical order, counts its operators."""
