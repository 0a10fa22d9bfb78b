"""Models: real networks cut into units, and the data they train on.

catalog         models by name: family, size, data set (imports no torch)
data_choice     put a model on the data that a user names (imports no torch)
sources         models that users bring, by name: transformers configurations, functions (imports no torch)
any             models that nobody edited, cut into units
build           units of a model, same weights whichever are built; tied parameters; example inputs
blank           units without weights of their own, for a device that takes them over from others
units           what a unit is; the loss; names of parameters in the unsplit model
units_init      initial weights of the image models, whose batch statistics are frozen
gpt2            GPT-2 as units
bert            BERT for masked bytes as units
resnet          ResNet as units, one residual block each
efficientnet    EfficientNet as units, one MBConv block each
whole           the unsplit model, and the names of its parameters
graph           the UnitGraph of a model: cut tensors, bytes, operations, measured on small batches
data            open a data set: windows of text, pictures, handwritten digits
data_tokenizer  text as bytes, or as the tokens of a tokenizer's file
data_documents  lines of JSON, and data sets that the `datasets` library saved
data_images     pictures of classes
data_user       samples from a user's function, or of a factory's example batch
text            text as numbers, cut into windows: the standard library's sources, or the user's
sampler         which samples belong to which step: seeded, stateless, resumable
hashing         integer mixing and derived seeds that are the same on every machine
stage           run the F, I and W of a stage
tensor          tensor parallelism in any ratio: units divided among a group
flop            count operations, in one thread
held            count the bytes of tensors that are really held
held_member     measure what members of a tensor-parallel group hold of a unit
segment         run a part of a stage, held or computed again
split_backward  wrap torch's private halves of the backward pass
precision       the type that torch computes products in
device          real and emulated devices
"""
