"""The ORT format: its tables read and written, its canonical bytes, its census of operators."""
