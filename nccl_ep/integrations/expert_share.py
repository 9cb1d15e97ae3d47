"""A rank's share of an experts module: cut, saved whole, and loaded from what is whole."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _composable_state
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

from ..bootstrap import Rendezvous
from ..buffer import Buffer
from ..checks import described
from ..errors import UsageError
from ..functional import dispatch

_STATE = "_nccl_ep"  # attribute of an experts module
_CALLS = (
    "call, on all ranks, save_pretrained(model, folder), full_state_dict(model) or, for torch.distributed.checkpoint, "
    "sharded_state_dict(model) of nccl_ep.integrations.transformers"
)


class Share:
    """What an experts module needs. ``num_experts``: of all ranks. ``stands_in``: what a state_dict holds, by name."""

    def __init__(
        self, buffer: Buffer, rendezvous: Rendezvous, hidden: int, dtype: torch.dtype, num_experts: int,
        compute: Callable[..., torch.Tensor],
    ) -> None:  # fmt: skip
        self.buffer, self.rendezvous, self.compute = buffer, rendezvous, compute
        self.hidden, self.dtype = hidden, dtype  # of the buffer's rows
        self.num_experts, self.num_local = num_experts, num_experts // rendezvous.size()
        self.first = rendezvous.rank() * self.num_local
        self.names: list[str] = []
        self.stands_in: dict[str, torch.Tensor] | None = None
        # What was found to be this rank's own: parameters, and the DDP around that leaves them alone.
        self.own_parameters: list[weakref.ref[torch.Tensor]] = []
        self.ddp: Callable[[], Any] = lambda: None

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.first : self.first + self.num_local]

    def taken_from(self, given: Any) -> torch.Tensor | None:
        """This rank's slices of a tensor of all experts; the rank's own of a DTensor that ``Sharder`` made."""
        if hasattr(given, "to_local") and given.to_local().shape[0] == self.num_local:
            return given.to_local()  # type: ignore[no-any-return]
        return self.of(_plain(given)) if given.shape[0] == self.num_experts else None

    def __reduce__(self) -> Any:
        """Of pickle and copy.deepcopy: ``torch.save(model)`` comes here."""
        raise UsageError(
            "a model whose experts are shared out can be neither pickled nor copied, as it holds a buffer: "
            f"{_CALLS}. Make copies before use_expert_parallel"
        )


class _NoneOfOthers:
    """An attribute of a parameter of experts. Pickled, as by ``torch.save`` of parameters or of an optimizer, it would
    lack those of the other ranks."""

    def __init__(self, name: str, share: Share) -> None:
        self._said = (
            f"{name} of this rank has experts {share.first} to {share.first + share.num_local - 1} of "
            f"{share.num_experts}, and would be pickled without the others: {_CALLS}; of an optimizer, "
            "sharded_optimizer_state_dict(model, optimizer)"
        )

    def __reduce__(self) -> Any:
        raise UsageError(self._said)


def share_of(module: torch.nn.Module) -> Share | None:
    return getattr(module, _STATE, None)


def stacks_of(module: Any) -> dict[str, torch.Tensor]:
    """All parameters of an experts module itself, and its buffers that have a slice for each expert."""
    buffers = {
        name: each
        for name, each in module.named_buffers(recurse=False)
        if each.dim() > 0 and each.shape[0] == module.num_experts
    }
    return dict(module.named_parameters(recurse=False)) | buffers


def keep_share(module: Any, share: Share, kept: dict[int, torch.Tensor]) -> None:
    """``kept``: the shares of tensors by their ids; modules may have some in common."""
    stacks = stacks_of(module)
    for name, each in stacks.items():
        if id(each) not in kept:
            own = share.of(each.detach()).clone()
            if isinstance(each, torch.nn.Parameter):
                own = torch.nn.Parameter(own, requires_grad=each.requires_grad)
                own.__dict__.update(each.__dict__)
                if share.rendezvous.size() > 1:
                    own.__dict__[_STATE] = _NoneOfOthers(name, share)
            kept[id(each)] = own
        setattr(module, name, kept[id(each)])
    share.names = list(stacks)
    share.own_parameters = [weakref.ref(each) for each in module.parameters(recurse=False)]
    module.num_experts = share.num_local
    setattr(module, _STATE, share)
    module.register_state_dict_post_hook(_put_whole)
    module.register_load_state_dict_pre_hook(_take_share)


def full_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` with all experts, on rank 0; an empty dict on the other ranks. Collective.

    Experts, and what FSDP2 has sharded, are whole and on the CPU; everything else is as in ``state_dict()``.

    Raises: UsageError for a model whose experts are not shared out, or were sharded as if all ranks had the same ones;
    otherwise as ``nccl_ep.dispatch``.
    """
    with whole(model) as state:
        return state


@contextlib.contextmanager
def whole(model: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """Gives what ``full_state_dict`` returns. Meanwhile ``model.state_dict()`` of rank 0 has all experts, too."""
    gathered: dict[int, torch.Tensor] = {}

    def whole_of(share: Share, _name: str, own: torch.Tensor) -> torch.Tensor:
        if id(own) not in gathered:
            gathered[id(own)] = _gather(share, _plain(own))
        return gathered[id(own)]

    with _standing_in(model, whole_of) as is_first:
        state = {}
        for name, each in model.state_dict().items():
            full = _plain(each)
            if is_first:
                state[name] = full if full is each else full.cpu()
        yield state


def sharded_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` for ``torch.distributed.checkpoint``: experts are DTensors over the ranks of the group.

    ``dcp.save`` and ``dcp.load`` take it; a load writes into the model's own tensors, whatever the number of ranks that
    saved. Call it on all ranks.

    Raises: UsageError for a model whose experts are not shared out; TypeError where the group is no process group.
    """
    with _standing_in(model, Sharder("sharded_state_dict")):
        return dict(model.state_dict())


class Sharder:
    """Makes DTensors over the ranks of the group of tensors with a slice for each of the rank's experts."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._meshes: dict[int, Any] = {}

    def __call__(self, share: Share, name: str, own: torch.Tensor) -> torch.Tensor:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        group = share.buffer.group
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group is a {type(group).__name__}, must be a torch process group for {self._caller}: "
                "call full_state_dict"
            )
        if isinstance(own, DTensor):
            raise TypeError(f"{name} is a DTensor already, which {self._caller} does not take: call full_state_dict")
        if id(group) not in self._meshes:
            self._meshes[id(group)] = DeviceMesh.from_group(group, own.device.type)
        return DTensor.from_local(own.detach(), self._meshes[id(group)], [Shard(0)], run_check=False)


def shared_modules(model: torch.nn.Module) -> list[tuple[torch.nn.Module, Share]]:
    """Raises UsageError where there is none."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {described(model)}, must be a torch.nn.Module")
    shared = [(module, share) for module in model.modules() if (share := share_of(module)) is not None]
    if not shared:
        raise UsageError(f"the experts of this {type(model).__name__} are not shared out: call its state_dict()")
    return shared


@contextlib.contextmanager
def _standing_in(model: torch.nn.Module, make: Callable[[Share, str, torch.Tensor], torch.Tensor]) -> Iterator[bool]:
    """What ``make`` returns stands in for the experts in ``state_dict()`` meanwhile. Whether this is rank 0."""
    shared = shared_modules(model)
    try:
        for module, share in shared:
            own = {name: _own(module, share, name) for name in share.names}
            if share.rendezvous.size() > 1:
                own = {name: make(share, name, each) for name, each in own.items()}
            share.stands_in = own
        yield shared[0][1].rendezvous.rank() == 0
    finally:
        for _, share in shared:
            share.stands_in = None


def _own(module: torch.nn.Module, share: Share, name: str) -> torch.Tensor:
    """Raises UsageError where a wrapper has taken the tensor away, or mixed it with those of other ranks."""
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    if name not in own:
        raise UsageError(
            f"{name} of a {type(module).__name__} is no parameter any more: wrappers must leave experts out "
            "(FullyShardedDataParallel(ignored_states=...))"
        )
    _require_sharded_apart(module, share, name, own[name])
    return own[name]


def _require_sharded_apart(module: torch.nn.Module, share: Share, name: str, tensor: Any) -> None:
    """UsageError for a DTensor over ranks that have different experts."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is not None and isinstance(share.buffer.group, dist.ProcessGroup):
        both = set(mesh.mesh.flatten().tolist()) & set(dist.get_process_group_ranks(share.buffer.group))
        if len(both) > 1:
            raise UsageError(
                f"{name} of a {type(module).__name__} is sharded over ranks {sorted(both)}, which have different "
                "experts: wrappers must leave experts out (fully_shard(ignored_params=...))"
            )


def require_own(module: torch.nn.Module, share: Share) -> None:
    """UsageError where a wrapper has mixed the experts of this rank with those of others. Cheap for what is known."""
    if is_parametrized(module):  # PEFT does it for the time of a forward pass
        raise UsageError(
            f"the experts of a {type(module).__name__} have adapters or other parametrizations, which are this rank's "
            "alone: nothing knows that they are to be saved for all experts, and not averaged over the ranks. Merge "
            "them before use_expert_parallel"
        )
    own = list(module.parameters(recurse=False))
    if len(own) != len(share.own_parameters) or any(
        known() is not each for known, each in zip(share.own_parameters, own, strict=True)
    ):
        for state in [ref() for ref in _composable_state._module_state_mapping.values()]:  # of FSDP2
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for each in (each for group in groups if group is not None for each in getattr(group, "fsdp_params", ())):
                if getattr(getattr(each, "_module_info", None), "module", None) is module:
                    _require_sharded_apart(module, share, each._module_info.param_name, each.sharded_param)
        if any(getattr(each, "_fsdp_flattened", False) for each in own) or len(own) < len(share.own_parameters):
            raise UsageError(
                f"the experts of a {type(module).__name__} are in FullyShardedDataParallel's flat parameter, with "
                "those of other ranks: it must leave them out (ignored_states=...)"
            )
        share.own_parameters = [weakref.ref(each) for each in own]
    around: Any = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if around is None or share.ddp() is around:
        return
    taken = {id(each) for each in getattr(around, "_module_parameters", ())}
    if any(id(each) in taken for each in own):
        raise UsageError(
            f"DistributedDataParallel of a {type(around.module).__name__} has given all ranks the experts of rank 0: "
            "call use_expert_parallel with the very module that is wrapped, before it is, and load the weights again"
        )
    share.ddp = weakref.ref(around)


def _put_whole(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Hook of state_dict."""
    share = share_of(module)
    assert share is not None
    if share.rendezvous.size() == 1:
        return
    if share.stands_in is None:
        raise UsageError(
            f"{prefix.rstrip('.') or type(module).__name__} of this rank has experts {share.first} to "
            f"{share.first + share.num_local - 1} of {share.num_experts}: its state_dict would lack the others; "
            f"{_CALLS}"
        )
    for name, each in share.stands_in.items():
        state_dict[prefix + name] = each


def _take_share(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], _strict: bool,
    _missing: list[str], _unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    """Hook of load_state_dict: a tensor of all experts becomes one of this rank's."""
    share = share_of(module)
    assert share is not None
    if share.rendezvous.size() == 1:
        return
    for name in share.names:
        given = state_dict.get(prefix + name)
        if not isinstance(given, torch.Tensor) or given.dim() == 0:  # torch says what it must be
            continue
        own = share.taken_from(given)
        if own is not None:
            # A view would keep all experts in memory where it becomes the parameter.
            is_view = own.untyped_storage().nbytes() > own.nbytes
            state_dict[prefix + name] = own.clone() if is_view and metadata.get("assign_to_params_buffers") else own
        else:
            del state_dict[prefix + name]
            errors.append(
                f"{prefix}{name} has {given.shape[0]} experts, must have all {share.num_experts}: whose they are "
                "cannot be known"
            )


def _plain(tensor: Any) -> Any:
    """Whole, if FSDP2 has sharded it. Collective then."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _gather(share: Share, own: torch.Tensor) -> torch.Tensor:
    """The slices of all ranks, on rank 0 and its CPU; elsewhere the own ones. Every rank sends its bytes as rows."""
    buffer, ranks = share.buffer, share.rendezvous.size()
    is_first, most = share.rendezvous.rank() == 0, buffer.max_tokens
    assert most is not None
    row_bytes = share.hidden * share.dtype.itemsize
    data = own.detach().to(buffer.device).contiguous().flatten().view(torch.uint8)
    rows = torch.nn.functional.pad(data, (0, -data.numel() % row_bytes)).view(-1, row_bytes)
    whole = torch.empty((ranks, *rows.shape) if is_first else 0, dtype=torch.uint8)
    for at in range(0, len(rows), most):
        some = rows[at : at + most]
        to_first = torch.zeros(len(some), 1, dtype=torch.int64, device=some.device)
        out = dispatch(
            some, to_first, None, buffer=buffer, num_experts=ranks, mode="ht", layout="packed", capacity="exact"
        )
        if is_first:
            whole[:, at : at + most] = out.x.view(ranks, len(some), row_bytes).cpu()
    if not is_first:
        return own.detach()
    every = whole.view(ranks, -1)[:, : data.numel()].contiguous().view(own.dtype)
    return every.view(share.num_experts, *own.shape[1:])
