"""All commands: where each is defined, and what it does. A module is imported only when its command runs."""

from __future__ import annotations

COMMANDS = {
    "models": ("vitrail.commands.models:models", "List all models with their parameters and GFLOPs."),
    "info": ("vitrail.commands.info:info", "Describe a checkpoint and verify it."),
    "convert": ("vitrail.commands.convert:convert", "Convert weights between formats."),
    "push": ("vitrail.commands.push:push", "Upload a checkpoint to the Hugging Face Hub, with a model card."),
    "export": ("vitrail.commands.export:export", "Export a model to ONNX or torch.export, verified on images."),
    "export verify": ("vitrail.commands.export:verify", "Compare an exported model with its checkpoint again."),
    "serve": ("vitrail.commands.serve:serve", "Serve models over HTTP."),
    "explore": ("vitrail.commands.explore:explore", "Show in the browser how a model sees images."),
    "train": ("vitrail.commands.train:train", "Train a model with a recipe."),
    "finetune": ("vitrail.commands.finetune:finetune", "Fine-tune a pretrained model."),
    "plan": ("vitrail.commands.plan:plan", "Estimate the memory that a recipe needs on any GPU, without that GPU."),
    "eval": ("vitrail.commands.evaluate:evaluate", "Evaluate a checkpoint on labelled images."),
    "reproduce": ("vitrail.commands.reproduce:reproduce", "Compare published weights with their published accuracy."),
    "fewshot": (
        "vitrail.commands.fewshot:fewshot",
        "Evaluate few-shot accuracy with a closed-form linear classifier.",
    ),
    "probe": ("vitrail.commands.probe:probe", "Fit a linear or k-NN classifier on frozen features."),
    "vtab": ("vitrail.commands.vtab:vtab", "Fine-tune on the tasks of VTAB-1k, or of the paper's transfer suite."),
    "predict": ("vitrail.commands.predict:predict", "Predict labels of images."),
    "embed": ("vitrail.commands.embed:embed", "Write image features to a file."),
    "neighbours": ("vitrail.commands.neighbours:neighbours", "Find the nearest neighbours of an image."),
    "inspect": ("vitrail.commands.inspect:inspect", "Plot what a checkpoint has learned, as in the paper's figures."),
    "study": ("vitrail.commands.study:study", "Repeat the paper's studies in small, within a time budget."),
    "study plot": ("vitrail.commands.study:plot", "Draw studies again from their CSV files."),
    "study results": ("vitrail.commands.study:results", "Compare studies with the paper's claims."),
    "bench": ("vitrail.commands.bench:bench", "Benchmark speed and memory, against other libraries and the matmul peak."),
    "data check": ("vitrail.commands.data:check", "Check every image of a dataset."),
    "data split": ("vitrail.commands.data:split", "Split a dataset, stratified by class."),
    "data pack": ("vitrail.commands.data:pack", "Decode and resize a dataset once, for fast training."),
    "data sheet": ("vitrail.commands.data_sheet:sheet", "Show training images as a recipe augments them."),
    "completion": ("vitrail.commands.completion:completion", "Print a script that completes commands in bash, zsh or fish."),
    "doctor": ("vitrail.commands.doctor:doctor", "Show what this machine supports and which extras are missing."),
}
