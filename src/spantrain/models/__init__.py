"""Models: real networks cut into units, and the data they train on.

catalog         models by name: family, size, data set (imports no torch)
build           units of a model, same weights whichever are built; tied parameters; example inputs
units           what a unit is; the loss; names of parameters in the unsplit model
units_init      initial weights of the image models, whose batch statistics are frozen
gpt2            GPT-2 as units
bert            BERT for masked bytes as units
resnet          ResNet as units, one residual block each
efficientnet    EfficientNet as units, one MBConv block each
graph           the UnitGraph of a model: cut tensors, bytes, operations, measured on small batches
data            open a data set: text windows, handwritten digits
text            bytes of the standard library's sources or of the user's files, cut into windows
sampler         which samples belong to which step: seeded, stateless, resumable
hashing         integer mixing and derived seeds that are the same on every machine
stage           run the F, I and W of a stage
split_backward  wrap torch's private halves of the backward pass
device          real and emulated devices
"""
