"""Which operations a unit does in an action, where its activations are computed again.

A recomputed unit does F again and all of its backward pass as soon as its output's gradient is there: in I, or in B. W
has nothing left to do for it (`models.execution.segment` says why).
"""

from spantrain.core.action import Op


def operations_of(op: Op, *, recomputed: bool) -> tuple[Op, ...]:
    """Return what a unit does in an action of its stage.

    >>> [operation.value for operation in operations_of(Op.BACKWARD_INPUT, recomputed=True)]
    ['F', 'I', 'W']
    >>> operations_of(Op.BACKWARD_WEIGHT, recomputed=True)
    ()
    """
    if not recomputed:
        return (op,)
    match op:
        case Op.FORWARD:
            return (op,)
        case Op.BACKWARD_INPUT:
            return (Op.FORWARD, op, Op.BACKWARD_WEIGHT)
        case Op.BACKWARD_WEIGHT:
            return ()
        case Op.BACKWARD:
            return (Op.FORWARD, op)
