"""What is between an optimizer of PyTorch's kind and the C library: `engine`, one device's share of it; `placement`,
who comes to which engine; `state`, what a checkpoint must have; `report`, what it all takes.
"""
