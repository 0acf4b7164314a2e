"""Writes every form of a model that a target loads, reproducible to the byte."""

from edgekit.convert.convert import ConvertedModel as ConvertedModel
from edgekit.convert.convert import convert_model as convert_model
from edgekit.convert.ort_form import OrtOptions as OrtOptions
from edgekit.convert.ort_form import write_ort as write_ort
from edgekit.convert.ort_format.report import OrtFileReport as OrtFileReport
from edgekit.convert.ort_format.report import inspect_ort as inspect_ort
