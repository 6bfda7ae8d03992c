"""The page of the metric on the Hub."""

import evaluate
from evaluate.utils import launch_gradio_widget

launch_gradio_widget(evaluate.load("acceptance_length.py"))
