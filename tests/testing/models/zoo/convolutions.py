"""Models of pictures of plain torch: in the manner of timm and of diffusers, and with statistics of batches."""

import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES, EDGE, WIDTH, KINDS = 6, 16, 16, 3


def _pictures() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, 3, EDGE, EDGE), torch.arange(SAMPLES) % KINDS


# --- in the manner of timm: blocks that are dropped for whole samples


class DropPath(nn.Module):
    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance

    def forward(self, hidden: Tensor) -> Tensor:
        if self.chance == 0.0 or not self.training:
            return hidden
        kept = hidden.new_empty((hidden.shape[0],) + (1,) * (hidden.dim() - 1)).bernoulli_(1 - self.chance)
        return hidden * kept.div_(1 - self.chance)


class Attention(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        samples, tokens, width = hidden.shape
        made = self.qkv(hidden).reshape(samples, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = made.unbind(0)
        found = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(found.transpose(1, 2).reshape(samples, tokens, width))


class Block(nn.Module):
    def __init__(self, chance: float) -> None:
        super().__init__()
        self.norm1, self.attn, self.drop_path1 = nn.LayerNorm(WIDTH), Attention(), DropPath(chance)
        self.norm2, self.drop_path2 = nn.LayerNorm(WIDTH), DropPath(chance)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.drop_path1(self.scale * self.attn(self.norm1(hidden)))
        return hidden + self.drop_path2(self.mlp(self.norm2(hidden)))


class TimmViT(nn.Module):
    def __init__(self, depth: int = 4, chance: float = 0.1) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, (EDGE // 4) ** 2 + 1, WIDTH))
        self.blocks = nn.Sequential(*(Block(chance * number / depth) for number in range(depth)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, KINDS)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.patch_embed(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.cls_token.expand(hidden.shape[0], -1, -1), hidden], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(hidden))[:, 0])


def timm_vit():
    return TimmViT(), _pictures(), functional.cross_entropy


# --- in the manner of diffusers: long skips, and the time in every block


class Residual(nn.Module):
    def __init__(self, read: int, written: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, read), nn.Conv2d(read, written, 3, padding=1)
        self.time = nn.Linear(32, written)
        self.norm2, self.conv2 = nn.GroupNorm(4, written), nn.Conv2d(written, written, 3, padding=1)
        self.shortcut = nn.Conv2d(read, written, 1) if read != written else nn.Identity()

    def forward(self, hidden: Tensor, time: Tensor) -> Tensor:
        made = self.conv1(functional.silu(self.norm1(hidden)))
        made = made + self.time(functional.silu(time))[:, :, None, None]
        return self.shortcut(hidden) + self.conv2(functional.silu(self.norm2(made)))


class Down(nn.Module):
    def __init__(self, read: int, written: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([Residual(read, written), Residual(written, written)])
        self.downsampler = nn.Conv2d(written, written, 3, stride=2, padding=1)

    def forward(self, hidden: Tensor, time: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        kept: tuple[Tensor, ...] = ()
        for resnet in self.resnets:
            hidden = resnet(hidden, time)
            kept += (hidden,)
        return self.downsampler(hidden), kept


class Up(nn.Module):
    def __init__(self, read: int, kept: int, written: int) -> None:
        super().__init__()
        self.upsampler = nn.Conv2d(read, read, 3, padding=1)
        self.resnets = nn.ModuleList([Residual(read + kept, written), Residual(written + kept, written)])

    def forward(self, hidden: Tensor, kept: tuple[Tensor, ...], time: Tensor) -> Tensor:
        hidden = self.upsampler(functional.interpolate(hidden, scale_factor=2.0, mode="nearest"))
        for resnet in self.resnets:
            hidden, kept = torch.cat([hidden, kept[-1]], dim=1), kept[:-1]
            hidden = resnet(hidden, time)
        return hidden


class DiffusionUNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (8, 12, 16)) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, widths[0], 3, padding=1)
        self.time_embedding = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.down_blocks = nn.ModuleList(map(Down, (widths[0], *widths), widths))
        self.mid_block = Residual(widths[-1], widths[-1])
        self.up_blocks = nn.ModuleList(map(Up, (widths[-1], *reversed(widths)), reversed(widths), reversed(widths)))
        self.conv_norm_out, self.conv_out = nn.GroupNorm(4, widths[0]), nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> dict[str, Tensor]:
        angles = timestep[:, None] * torch.exp(-torch.arange(8, device=sample.device) / 2)
        time = self.time_embedding(torch.cat([angles.sin(), angles.cos()], dim=1))
        hidden = self.conv_in(sample)
        kept: list[tuple[Tensor, ...]] = []
        for down in self.down_blocks:
            hidden, skips = down(hidden, time)
            kept.append(skips)
        hidden = self.mid_block(hidden, time)
        for up in self.up_blocks:
            hidden = up(hidden, kept.pop(), time)
        return {"sample": self.conv_out(functional.silu(self.conv_norm_out(hidden)))}


def diffusion_unet():
    noise = torch.randn(SAMPLES, 3, EDGE, EDGE)
    batch = {"sample": torch.randn_like(noise), "timestep": torch.randint(0, 1000, (SAMPLES,)), "labels": noise}
    return DiffusionUNet(), batch, lambda outputs, labels: functional.mse_loss(outputs["sample"], labels)


# --- statistics of batches


class ConvBlock(nn.Module):
    def __init__(self, read: int, written: int) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(read, written, 3, padding=1, bias=False), nn.BatchNorm2d(written)

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.relu(self.bn(self.conv(hidden)), inplace=True)


class BatchNormCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            ConvBlock(3, 8), nn.MaxPool2d(2), ConvBlock(8, 12), nn.MaxPool2d(2), ConvBlock(12, 16), ConvBlock(16, 16)
        )
        self.classifier = nn.Linear(16, KINDS)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).mean(dim=(2, 3)))


def batch_norm_cnn():
    return BatchNormCNN(), _pictures(), functional.cross_entropy


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([ConvBlock(3, 8), ConvBlock(8, 12), ConvBlock(12, 16)])
        self.grow = nn.ModuleList([nn.ConvTranspose2d(16, 12, 2, 2), nn.ConvTranspose2d(12, 8, 2, 2)])
        self.up = nn.ModuleList([ConvBlock(24, 12), ConvBlock(16, 8)])
        self.out = nn.Conv2d(8, KINDS, 1)

    def forward(self, images: Tensor) -> Tensor:
        kept, hidden = [], images
        for number, down in enumerate(self.down):
            hidden = down(functional.max_pool2d(hidden, 2) if number else hidden)
            kept.append(hidden)
        kept.pop()
        for grow, up in zip(self.grow, self.up, strict=True):
            hidden = up(torch.cat([kept.pop(), grow(hidden)], dim=1))
        return self.out(hidden)


def unet():
    batch = torch.randn(SAMPLES, 3, EDGE, EDGE), torch.randint(0, KINDS, (SAMPLES, EDGE, EDGE))
    return UNet(), batch, functional.cross_entropy


# --- in the manner of neural operators: weights are complex


class Spectral(nn.Module):
    MODES = 4

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, self.MODES, dtype=torch.cfloat) / WIDTH)
        self.beside = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        waves = torch.fft.rfft(hidden)
        kept = torch.einsum("bix,iox->box", waves[..., : self.MODES], self.weight)
        filled = functional.pad(kept, (0, waves.shape[-1] - self.MODES))
        return functional.gelu(torch.fft.irfft(filled, n=hidden.shape[-1]) + self.beside(hidden))


def fourier_operator():
    layers = (nn.Conv1d(1, WIDTH, 1), *(Spectral() for _ in range(4)), nn.Conv1d(WIDTH, 1, 1))
    rows = torch.randn(SAMPLES, 1, EDGE)
    return nn.Sequential(*layers), (rows, rows.roll(1, -1)), functional.mse_loss
