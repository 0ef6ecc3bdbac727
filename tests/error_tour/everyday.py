"""Everyday mistakes on the command line and in Python; the site's reference shows this table."""

from __future__ import annotations

from tests.error_tour.case import Case

# fmt: off
CASES = (
    Case(
        'Commands and options', 'a mistyped command', 'vitrail pridict cat.jpg',
        "There is no command 'pridict'.",
        ('Did you mean predict?', 'See `vitrail --help`.'), at="cli.py:_run#2",
    ),
    Case(
        'Commands and options', 'a group without its command', 'vitrail data',
        "There is no command 'data'.",
        ('Use one of: data check, data split, data pack, data sheet.',), at="cli.py:_run#1",
    ),
    Case(
        'Commands and options', 'a number that is not finite', 'vitrail train digits --optim.lr nan',
        '--optim.lr is nan;',
        ('it must be a finite number, such as 0.1.',), at="commands/arguments.py:parse",
    ),
    Case(
        'Commands and options', 'a number out of range', 'vitrail predict model cat.jpg --top 0',
        'top is 0;',
        ('use 1 or more.',), at="evaluate/predictor.py:check_prediction",
    ),
    Case(
        'Commands and options', 'a port that does not exist', 'vitrail serve model --port 99999',
        '--port is 99999;',
        ('it must be between 0 and 65535.',), at="serve/server.py:_bind#1",
    ),
    Case(
        'Commands and options', 'an extra that is not installed', 'vitrail serve model',
        'The service needs fastapi',
        ("install the extra with pip install 'vitrail[serve]'.",), at="commands/serve.py:serve", hidden="fastapi",
    ),
    Case(
        'Paths and sources', 'an image that is not there', 'vitrail predict nowhere.jpg',
        'There is no file or folder nowhere.jpg.',
        ('Check the path.',),
    ),
    Case(
        'Paths and sources', 'an empty folder', 'vitrail predict empty',
        'The folder empty is empty:',
        ('there is neither an image nor a checkpoint in it.',), at="commands/default_model.py:split_checkpoint#2",
    ),
    Case(
        'Paths and sources', 'data that is not there', 'vitrail probe model --data nowhere',
        "'nowhere' is neither an existing path nor a source.",
        ('A source is digits, folder:…, csv:…, packed:…, torchvision:…, hf:…, wds:… or a path.',),
        at="data/sources/__init__.py:_infer_kind#2",
    ),
    Case(
        'Paths and sources', 'a mistyped kind of source', 'vitrail data check foldr:photos',
        "there is no source kind 'foldr'.",
        ('Did you mean folder?',), status=1,
        at="data/sources/__init__.py:resolve#2",
    ),
    Case(
        'Paths and sources', 'a mistyped option of a source', 'vitrail data check photos?vall=0.1',
        "folder: has no option 'vall'.",
        ('Did you mean val? Its options are val, labels.',), status=1,
        at="data/sources/reference.py:Request.allow_options",
    ),
    Case(
        'Paths and sources', 'a dataset that torchvision has under another name', 'vitrail data check torchvision:CIFAR',
        "the torchvision dataset 'CIFAR'.",
        ('Did you mean CIFAR10 or CIFAR100?',), status=1,
        at="data/sources/torchvision.py:open_torchvision#1",
    ),
    Case(
        'Paths and sources', 'a split that is not there', 'vitrail eval model --data photos --split tset',
        "photos has no split 'tset';",
        ('it has train, val.',),
        at="data/types.py:Source.split",
    ),
    Case(
        'Paths and sources', 'tasks that are not there', 'vitrail vtab model --root empty',
        'None of the tasks (19) is in empty.',
        ('`vitrail vtab --root empty` says how to get the data.',), at="commands/vtab.py:vtab",
    ),
    Case(
        'Images, labels and tables', 'images without class folders', 'vitrail data check flat',
        '3 images',
        ('a table, as csv:FILE', 'For images without labels (pre-training or prediction) use folder:flat?labels=none'), status=1,
        at="data/sources/folder.py:_layout_error",
    ),
    Case(
        'Images, labels and tables', 'a text file named .jpg', 'vitrail predict text.jpg',
        'text.jpg: a text file, not an image',
        ('1 of 1 image could not be read.',), status=1,
    ),
    Case(
        'Images, labels and tables', 'an empty file', 'vitrail predict zero.jpg',
        'zero.jpg: an empty file (0 bytes)',
        ('1 of 1 image could not be read.',), status=1,
    ),
    Case(
        'Images, labels and tables', 'a truncated JPEG', 'vitrail predict truncated.jpg',
        'truncated.jpg: truncated: the file ends before the image is complete',
        ('1 of 1 image could not be read.',), status=1,
    ),
    Case(
        'Images, labels and tables', 'a bad image in training data', 'vitrail finetune --from model --data photos-bad --batch 2',
        '1 of 7 images cannot be read: cat/bad.jpg: truncated',
        ('Repair or remove them, or skip them with --bad-images skip.',), at='api/image_check.py:ImageCheck.__call__',
    ),
    Case(
        'Images, labels and tables', 'a class that the model does not have', 'vitrail eval model --data other',
        "has class 'fox', which the model does not have (cat, dog).",
        ('Remove it, or pass --ignore-unknown-classes to skip its images.',),
    ),
    Case(
        'Images, labels and tables', 'a row with too few cells', 'vitrail data check csv:table.csv',
        'table.csv, line 3: 1 cell, but the first line has 2.',
        ('Quote names that contain a comma',), status=1,
        at="data/sources/csv.py:_read#3",
    ),
    Case(
        'Images, labels and tables', 'a row whose file is missing', 'vitrail data check csv:missing.csv',
        '1 listed image not found.',
        ('nowhere.jpg: no such file (line 3 of missing.csv)',), status=1,
        at="data/sources/csv.py:_missing_files#2",
    ),
    Case(
        'Images, labels and tables', 'more shots than images', 'vitrail fewshot model --data photos --shots 25',
        "Class 'cat' has 4 images, fewer than 25 shots.",
        ('Use fewer --shots, or pass --small-classes drop to leave such classes out.',),
        at="evaluate/support_set.py:_refuse_small_classes",
    ),
    Case(
        'Images, labels and tables', 'impossible fractions', 'vitrail data split photos photos.csv --val 1.5',
        'val 1.5 and test 0:',
        ('expected fractions from 0 to below 1, with a sum above 0 and below 1.',), at="commands/data.py:split#2",
    ),
    Case(
        'Checkpoints and names', 'a checkpoint that is not there', 'vitrail info nowhere.npz',
        "There is no checkpoint 'nowhere.npz'.",
        ('Give a folder, an .npz, .pth or .safetensors file', '`vitrail models --pretrained` lists them'),
        at='checkpoints/loading.py:locate#2',
    ),
    Case(
        'Checkpoints and names', 'a model that is not there', 'vitrail models ViT-B/17x',
        "There is no model 'ViT-B/17x'.",
        ('Did you mean ViT-B/16', '`vitrail models` lists them all.'), at="models/variants.py:canonical_name#2",
    ),
    Case(
        'Checkpoints and names', 'a model without published weights', 'vitrail info ViT-B/17',
        'There are no published weights of ViT-B/17.',
        ('There are weights of ViT-B/8, ViT-B/14, ViT-B/16 and ViT-B/32.',
         "`vitrail.create_model('ViT-B/17')` makes an untrained model."),
        at='checkpoints/published.py:find#1',
    ),
    Case(
        'Checkpoints and names', 'a mistyped tag', 'vitrail info ViT-B/16@maee',
        "ViT-B/16 has no published weights tagged 'maee'.",
        ('Did you mean mae?',), at='checkpoints/published.py:find#2',
    ),
    Case(
        'Checkpoints and names', 'a corrupted archive', 'vitrail info broken.npz',
        'Cannot read broken.npz as a checkpoint',
        ('The file is corrupted or incomplete: download or copy it again.',), at='checkpoints/archive.py:wrap_errors#3',
    ),
    Case(
        'Checkpoints and names', 'a file that is no checkpoint', 'vitrail info notes.txt',
        'notes.txt is not a supported weight file (.npz, .safetensors or .pth).',
        ('download or copy it again.',), at='checkpoints/archive.py:open_archive',
    ),
    Case(
        'Checkpoints and names', 'a pickle that would run code', 'vitrail info code.pth',
        'code.pth needs unsafe unpickling, which can run any code, so it is rejected.',
        ('Open it in a sandbox', 'or use a .safetensors file.'), at='checkpoints/archive.py:_open_pth',
    ),
    Case(
        'Checkpoints and names', 'tensors of no known format', 'vitrail info numbers.npz',
        'numbers.npz contains 1 tensor (a), whose names match no supported format',
        ('its names may have an extra prefix.',), at='checkpoints/formats.py:detect_format#3',
    ),
    Case(
        'Checkpoints and names', 'a folder with another config.json', 'vitrail info config-only',
        'config-only/config.json is not the config of a Vitrail checkpoint.',
        ('Give a folder that `vitrail.save` or a run has written, or the weight file itself.',),
        at='checkpoints/native.py:_check_version#1',
    ),
    Case(
        'Checkpoints and names', 'a flipped bit in the weights', 'vitrail info flipped',
        'flipped: the weights are not those that were saved: their checksum differs from config.json.',
        ('download or copy it again.', "Load it with verify='none' to skip this check."), at='checkpoints/native.py:read',
    ),
    Case(
        'Checkpoints and names', 'a backbone asked to classify', 'vitrail predict zero-head cat.jpg',
        'The head is all zeros: zero-head is only a backbone',
        ('Fine-tune it on your classes (`vitrail finetune`), or use its features (`vitrail fewshot`, `vitrail embed`).',),
        at='checkpoints/bundle.py:Bundle.check_head',
    ),
    Case(
        'Checkpoints and names', 'a mistyped preset', 'vitrail predict model cat.jpg --preprocess imagnet',
        "There is no preprocessing 'imagnet'.",
        ('Did you mean imagenet?',),
    ),
    Case(
        'Checkpoints and names', 'an extension of another format', 'vitrail convert model out.pth --to google',
        'out.pth must end in .npz',
        ("for the format of Google's vision_transformer.",), at='checkpoints/conversion.py:_temporary#1',
    ),
    Case(
        'Checkpoints and names', 'other channels without a rule', 'vitrail.load("model", channels=1)',
        'The model has 3 input channels.',
        ("For channels=1, choose the rule: stem='sum'",), at='checkpoints/adapt.py:change_channels#1',
    ),
    Case(
        'Checkpoints and names', 'too few class names', 'vitrail.load("model", classes=["cat"])',
        'The model has 2 outputs, but the list of classes has 1 name.',
        ('Give one name per output.',), at='checkpoints/native.py:check_task#2',
    ),
    Case(
        'Models and sizes', 'a size that is no multiple of the patch', 'vitrail.create_model("ViT-B/16", image_size=222)',
        'Image 222×222 is not a multiple of patch 16.',
        ('Nearest: 208×208, 224×224.', 'Resize or pad the images to one of these, or change the patch.'),
        at="models/config.py:check_image_size",
    ),
    Case(
        'Models and sizes', 'a choice that is not there', 'vitrail.create_model("ViT-B/16", pooling="max")',
        "pooling is 'max';",
        ("it can be 'class', 'mean', 'map'.",), at="models/config.py:_Fields._check",
    ),
    Case(
        'Models and sizes', 'heads that do not divide the width', 'vitrail.create_model("ViT-B/16", heads=7)',
        'Width 768 is not a multiple of 7 heads.',
        ('Change one of them.',), at="models/config.py:ViTConfig._check_widths#1",
    ),
    Case(
        'Models and sizes', 'a mistyped field', 'vitrail.create_model("ViT-B/16", widht=100)',
        "ViTConfig has no field 'widht'.",
        ('Did you mean width?',), at="models/config.py:_refuse_unknown",
    ),
    Case(
        'Models and sizes', "images of another size than the model's",
        'vitrail.create_model("ViT-Ti/16", device="meta")(torch.zeros(1, 3, 240, 224, device="meta"))',
        'ViT-Ti/16 expects 224×224 images, these are 240×224.',
        ('Resize the images, or the model with model.resize((240, 224)), or load or create it with any_size=True.',),
        at="models/features.py:_check_size",
    ),
    Case(
        'Models and sizes', 'channels last',
        'vitrail.create_model("ViT-Ti/16", device="meta")(torch.zeros(1, 224, 224, 3, device="meta"))',
        'ViT-Ti/16 has 3 input channels, these images have 224.',
        ('Channels come before rows: use images.permute(0, 3, 1, 2).',), at="models/features.py:check_images#3",
    ),
    Case(
        'Models and sizes', 'a layer that is not there', 'vitrail inspect model cat.jpg --layers 7 --out inside',
        'There is no layer 7:',
        ('the model has 2, numbered 0 to 1.',), at="models/features.py:chosen_layers#2",
    ),
    Case(
        'Training and studies', 'a mistyped recipe', 'vitrail train digit',
        "There is no recipe 'digit'.",
        ('Did you mean digits?', '`vitrail train --recipes` lists them.'), at="recipes/__init__.py:recipe_named",
    ),
    Case(
        'Training and studies', 'more images per batch than there are', 'vitrail train digits --batch 5000',
        '0 optimiser steps per epoch: 1,438 images < batch 5000.',
        ('Use a smaller batch, more images, or keep the last, smaller batch',),
    ),
    Case(
        'Training and studies', 'a warm-up longer than the run', 'vitrail train digits --steps 2',
        'The warm-up of 50 steps is longer than the whole run of 2 steps.',
        ('Train longer, or set --schedule.warmup to 0 or 10%.',), at="train/schedules.py:check_schedule",
    ),
    Case(
        'Training and studies', 'a learning rate below zero', 'vitrail train digits --optim.lr -1',
        'optim.lr is -1;',
        ('a learning rate is above 0.',), at="train/config.py:_check_optimiser#1",
    ),
    Case(
        'Training and studies', 'a run of no length', 'vitrail train digits --epochs 0',
        'epochs is 0;',
        ('there would be nothing to train.',), at="train/config.py:check#5",
    ),
    Case(
        'Training and studies', 'a mistyped study', 'vitrail study data-sizes',
        "There is no study 'data-sizes'.",
        ('Did you mean data-size?',), at="study/definitions/__init__.py:study_named",
    ),
    Case(
        'Training and studies', 'studies that were not run', 'vitrail study plot all --out empty',
        'empty has no results of a study.',
        ('Run `vitrail study NAME --out empty` first.',), at="study/report.py:write_outputs",
    ),
    Case(
        'Training and studies', 'ImageNet left out', 'vitrail reproduce ViT-B/16',
        'No images are given.',
        ("Pass --imagenet DIR with ImageNet's validation images",), at="evaluate/reproduction.py:_check_folders#2",
    ),
    Case(
        'Files to write', 'a target that is something else', 'vitrail export model notes.txt',
        'notes.txt exists and is not an exported model;',
        ('give a new folder.',), at='export/write.py:check_target#2',
    ),
    Case(
        'Files to write', 'a file where a folder is written', 'vitrail export model pets.onnx',
        'The target is a folder, but pets.onnx is the name of a file.',
        ('Give a folder such as pets; model.onnx is written into it.',), at='export/write.py:check_target#1',
    ),
    Case(
        'Files to write', 'int8 without images', 'vitrail export model out --precision int8',
        'int8 needs images to measure the ranges of activations with:',
        ('give a data source with --calibrate.',), at="commands/export.py:export",
    ),
    Case(
        'Files to write', 'a folder that is not a packed dataset', 'vitrail data pack photos model --image-size 32',
        'model is not a packed dataset: it has no packed.json.',
        ('Create one with `vitrail data pack SOURCE model`.',),
        at="data/sources/packed_files.py:read_description#1",
    ),
    Case(
        'Files to write', 'embeddings of another kind of file', 'vitrail neighbours notes.txt cat.jpg',
        'An embeddings file must end in .npz or .parquet;',
        ("'notes.txt' does not.",), at="evaluate/embeddings.py:check_extension",
    ),
)
# fmt: on
