"""Code of the kind that `patch` is for: it imports eformer by name and cannot be changed.

Shaped like EasyDeL's base module: rules of the model's configuration, a tree of parameters, and from
these the specs, shardings, and functions that place and fetch each array.
"""

import jax
from eformer.escale import get_corrected_named_sharding, make_shard_and_gather_fns
from eformer.escale import match_partition_rules as match_rules


class Model:
    def __init__(self, rules, parameters, mesh):
        self.rules, self.parameters, self.mesh = rules, parameters, mesh

    def partition_specs(self):
        return match_rules(self.rules, self.parameters)

    def shardings(self):
        with self.mesh:
            return jax.tree.map(
                lambda spec, leaf: get_corrected_named_sharding(leaf.shape, spec),
                self.partition_specs(),
                self.parameters,
            )

    def shard_and_gather_fns(self):
        return make_shard_and_gather_fns(jax.tree.map(lambda sharding: sharding.spec, self.shardings()), self.mesh)
