"""The trainer that shows the operator at work: `python train/run.py softmax=fused`."""
