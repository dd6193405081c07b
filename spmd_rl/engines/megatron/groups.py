"""The plan's process groups of one role, as megatron-core wants them."""

from spmd_rl.runtime.mcore import ProcessGroupCollection
from spmd_rl.runtime.process_groups import ProcessGroups
from spmd_rl.topology.layout import RoleLayout

DENSE = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "mp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"),
    "dp_cp": ("dp", "cp"),
    "intra_dp_cp": ("dp", "cp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
}
EXPERT = {
    "ep": ("ep",),
    "expt_tp": ("etp",),
    "expt_dp": ("edp",),
    "intra_expt_dp": ("edp",),
    "tp_ep": ("etp", "ep"),
    "tp_ep_pp": ("etp", "ep", "pp"),
}
"""megatron-core's name -> the axes of the layout that the group runs along."""


def collection(layout: RoleLayout, groups: ProcessGroups) -> ProcessGroupCollection:
    """This rank's groups on the role's layout. Makes no group: all are registered at start-up, from the plan.

    Tied embeddings have none of their own: their gradients are added up over pp (see `gradients.add_tied`).
    """
    assert layout.expert is not None, f"role {layout.role} has a Megatron layout"
    found = {name: groups.along(layout.mesh, *axes) for name, axes in DENSE.items()}
    found |= {name: groups.along(layout.expert, *axes) for name, axes in EXPERT.items()}
    return ProcessGroupCollection(**found, embd=None, pos_embd=None, hcp=None, intra_dist_opt=None)
