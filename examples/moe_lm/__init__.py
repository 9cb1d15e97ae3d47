"""A Mixture-of-Experts language model that is trained and served with expert parallelism.

python -m examples.moe_lm.train       trains it; ranks are processes on the CPU, or a GPU each
python -m examples.moe_lm.serve       serves it: continuous batching, a load generator, latencies
python -m examples.moe_lm.pictures    draws what the two have written

Read model.py first, then exchange.py: that is where tokens travel. baseline.py does the same with torch alone.
"""
