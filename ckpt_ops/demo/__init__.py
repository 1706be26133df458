"""The demo behind `python -m ckpt_ops demo`: one GPT, trained with torch's layers and with ours.

model.py            the GPT; its blocks take the layers to build with
torch_layers.py     torch's layers; ours are ckpt_ops.nn
variants.py         what is compared
training.py         a training run, what it keeps, and how exact it is
ladder.py           the same model on every rung of ckpt_ops.regenerate
run.py              all of it in order; report.py, picture.py and ladder_picture.py show the result
"""
