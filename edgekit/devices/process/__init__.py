"""How a device's process is started and fed: jobs and tensors in, tensors and a report out."""
