"""Tensor parallelism in any ratio: what a member of a group holds of a model's units, and how the members agree.

shard      divide the units of a stage; what is left whole, and why
find       what of a unit is divided
rules      regions of linear layers: attention by whole heads, feed-forward networks, chains in nn.Sequential
words      regions in the words of transformers' tensor-parallel plans
images     regions of convolutions
multihead  torch's own attention module and transformer layers
positions  attention with learned relative positions
experts    experts of a mixture
division   what becomes of each module of a region
layers     divided linear layers, convolutions and embeddings
sequence   slices of the sequence between divided layers
blocks     the blocks that can work on slices of the sequence
divided    tensors of which each member has a part, and which behave as the whole would
logits     outputs of a divided output layer, and their cross-entropy
functions  sums and gatherings over a group, for autograd
group      the members of a group, in processes or in threads
pieces     by which whole pieces a unit is divided, for the cost model
slices     parts of tensors: taken out of the whole, put back
"""
