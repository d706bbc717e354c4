"""Read by Python in every process that the tests start: importing torch makes a million objects that stay, and looking through
them again and again takes 0.3 s of a start. The tests make several hundred."""

import gc

gc.set_threshold(100_000, 50, 50)
