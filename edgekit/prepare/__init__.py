"""Prepares a model for a target: static shapes, a clean graph, and rewrites by which providers take more of it."""

from edgekit.prepare.clean import prepare_model as prepare_model
from edgekit.prepare.fix import Fix as Fix
from edgekit.prepare.fix import FixedModel as FixedModel
from edgekit.prepare.fix import fix_model as fix_model
from edgekit.prepare.fix import ready_model as ready_model
