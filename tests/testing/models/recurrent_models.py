"""Recurrent models of torch, with and without sequences that are packed."""

from torch import Tensor, nn


class Recurrent(nn.Module):
    """What the last state of two layers says."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(width, width, num_layers=2, dropout=0.25, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.recurrent(hidden)[0][:, -1])


class ReadsPacked(nn.Module):
    """Texts of unlike lengths, as recurrent layers have them: packed, and padded again for what reads all words."""

    def __init__(self, words: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, classes)
        self.layers = nn.ModuleList((nn.LSTM(width, width, batch_first=True), nn.GRU(width, width, batch_first=True)))

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        hidden, how = self.embedding(words), {"batch_first": True}
        for layer in self.layers:
            packed = nn.utils.rnn.pack_padded_sequence(hidden, lengths.cpu(), enforce_sorted=False, **how)
            hidden, _ = nn.utils.rnn.pad_packed_sequence(layer(packed)[0], total_length=words.shape[1], **how)
        return self.head(hidden.sum(dim=1))
