"""Which part of a model a worker has, and the whole tensors, gathered."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from allstep.comm import Communicator, Mesh, Shard, divided_modules, shards_of, stages_of
from allstep.doctor.script import ScriptRefusedError
from allstep.doctor.verify.record import WorkerRecord, mesh_text
from allstep.doctor.verify.sketch import Sketch
from allstep.torch_classes import is_dtensor


class Parts:
    """A worker's parts of the attached models, and its place in the mesh that the script makes.

    Args:
        record: of this worker, where they are written down.
        axes: name -> length, of the mesh that the script has to make; empty for any, or none.
        shapes: of whole parameters, from the record of another run. [Note: parts by shape]
    """

    def __init__(
        self, record: WorkerRecord, axes: Mapping[str, int], shapes: Mapping[str, Sequence[int]]
    ) -> None:
        self._record, self._axes, self._whole_shapes = record, axes, shapes
        self._meshes: list[Mesh[Communicator]] = []
        self._shards: dict[nn.Parameter, Shard] = {}

    def see_mesh(self, mesh: Mesh[Communicator]) -> None:
        """Takes note of a mesh that the script has made; the first is compared with `axes`.

        Raises:
            ScriptRefusedError: if it is another one.
        """
        wanted = self._axes
        if wanted and not self._meshes:
            made = f"makes a mesh of {mesh_text(mesh.shape)} where `mesh` is {mesh_text(wanted)}"
            for name in wanted:
                if name not in mesh.shape:
                    axes = ", ".join(mesh.shape)
                    raise ScriptRefusedError(f"{made}: its axes are {axes}, without `{name}`.")
            if any(length != wanted.get(name, 1) for name, length in mesh.shape.items()):
                raise ScriptRefusedError(
                    f"{made}: give it the lengths by flags of its own, as in `-- --tensor-parallel"
                    " {tensor}`, where {tensor} stands for that of an axis `tensor`."
                )
        self._meshes.append(mesh)

    def check_mesh(self) -> None:
        """Checks that there is one, if there has to be.

        Raises:
            ScriptRefusedError: if there is none.
        """
        if self._axes and not self._meshes:
            raise ScriptRefusedError(
                f"makes no mesh before it attaches a model, and `mesh` is {mesh_text(self._axes)}:"
                " make one with `comm.mesh(data=..., tensor=...)`, or compare numbers of workers"
                " with `-n`."
            )

    def add(self, model: nn.Module, comm: Communicator, prefix: str) -> None:
        """Finds what is cut of a model. Collective.

        Args:
            model: attached.
            comm: to which.
            prefix: of its parameters' names in `shapes`, if there are several models.
        """
        shapes = {name.removeprefix(prefix): shape for name, shape in self._whole_shapes.items()}
        found = find_parts(model, comm, self._meshes, shapes)
        for name, shard in {**found, **shards_of(model)}.items():
            self._shards[model.get_parameter(name)] = shard
            self._record.place = shard.comm.rank
        for mesh in self._meshes:
            for axis in (name for name in mesh.shape if mesh[name] is comm):
                self._note_place(mesh, axis)

    def _note_place(self, mesh: Mesh[Communicator], axis: str) -> None:
        """Among the workers that share a copy of a model that is attached along an axis."""
        record = self._record
        record.axes = {n: length for n, length in mesh.shape.items() if n != axis and length > 1}
        record.copy, record.place = mesh.coordinates[axis], 0
        for name, length in record.axes.items():
            record.place = record.place * length + mesh.coordinates[name]

    def is_cut(self, p: nn.Parameter) -> bool:
        """Whether other workers have other parts of it, and this one a plain tensor."""
        return p in self._shards

    def whole(self, p: nn.Parameter, tensor: Tensor) -> Tensor:
        """A tensor that is cut as the parameter; all workers with parts of it call this."""
        if is_dtensor(tensor):  # of FSDP2
            whole: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
            return whole
        shard = self._shards.get(p)
        if shard is None:
            return tensor.detach()
        return torch.cat(_gathered(shard, tensor), shard.dim)

    def note_shapes(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Writes down how large they are as a whole, and what of them this worker has."""
        for name, p in parameters:
            shape = list(p.shape)  # of a DTensor, the whole one
            shard = self._shards.get(p)
            if shard is not None:
                first, *others = _gathered(shard, p)
                shape[shard.dim] = sum(part.shape[shard.dim] for part in (first, *others))
                self._record.parts[name] = shard.axis
                if all(torch.equal(first, other) for other in others):
                    self._record.same_parts.append(name)
            self._record.shapes[name] = shape


def _gathered(shard: Shard, tensor: Tensor) -> tuple[Tensor, ...]:
    """All workers' parts."""
    return shard.comm.all_gather(tensor.detach().contiguous())


def join_sketches(
    sketches: Mapping[str, Sketch], model: nn.Module, prefix: str
) -> dict[str, Sketch]:
    """With those of what only other workers have: experts, stages. Collective if there are any.

    Args:
        sketches: this worker's, by name.
        model: attached.
        prefix: of its parameters' names.
    """
    comms = {name: modules.comm for name, modules in divided_modules(model).items()}
    comms |= {name: stages.comm for name, stages in stages_of(model).items()}
    found = dict(sketches)
    for name, comm in comms.items():
        begin = f"{prefix}{name}." if name else prefix
        own = {of: (s.norm, s.products) for of, s in sketches.items() if of.startswith(begin)}
        for others in comm.all_gather_object(own):
            found.update({of: Sketch(norm, products) for of, (norm, products) in others.items()})
    return found


def find_parts(
    model: nn.Module,
    comm: Communicator,
    meshes: Sequence[Mesh[Communicator]],
    shapes: Mapping[str, Sequence[int]],
) -> dict[str, Shard]:
    """Parameters that make up a whole one along an axis, in the order of the workers. Collective.

    [Note: parts by shape] A script may divide layers without `tensor_parallel`. What is whole in
    the run that it is compared with tells the parts: a parameter of that name whose sizes along
    one dimension add up to the whole one's over the workers along an axis.

    Args:
        model: this worker's.
        comm: that it is attached to: along that axis workers have the same parts.
        meshes: that the script has made.
        shapes: of whole parameters, by name.

    Returns:
        name -> shard.
    """
    if not shapes:
        return {}
    own = {name: list(p.shape) for name, p in model.named_parameters() if not is_lazy(p)}
    found: dict[str, Shard] = {}
    for mesh in meshes:
        axes = (axis for axis, n in mesh.shape.items() if n > 1 and mesh[axis] is not comm)
        for axis in axes:
            along = mesh[axis].all_gather_object(own)
            for name in own:
                sizes = [shapes_of.get(name) for shapes_of in along]
                dim = _cut_dim(sizes, shapes.get(name))
                if dim is not None and name not in found:
                    found[name] = Shard(mesh, axis, dim)
    return found


def _cut_dim(parts: Sequence[Sequence[int] | None], whole: Sequence[int] | None) -> int | None:
    """The dimension along which parts make up a whole.

    >>> _cut_dim([[2, 3], [2, 3]], [4, 3]), _cut_dim([[4, 3], [4, 3]], [4, 3])
    (0, None)
    """
    known = [part for part in parts if part is not None and len(part) == len(whole or ())]
    if whole is None or len(known) < len(parts):
        return None
    differing = [dim for dim, n in enumerate(whole) if any(part[dim] != n for part in known)]
    if len(differing) != 1 or sum(part[differing[0]] for part in known) != whole[differing[0]]:
        return None
    return differing[0]
