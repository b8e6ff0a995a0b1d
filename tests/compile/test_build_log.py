from moec.compile.build_log import causes, parse_log

LOG = """[VERBOSE] Layers:
of another engine
[INFO] Max Scratch Memory: 100 bytes
[INFO] Total Activation Memory: 200 bytes
[INFO] Max Scratch Memory: 300 bytes
[INFO] Total Activation Memory: 400 bytes
[INFO] Total Weights Memory: 50 bytes
[VERBOSE] Layers:
Name: attention_0, LayerType: PluginV3, Inputs: [ { Name: q, Location: Device, Dimensions: [4,1,4,64], Datatype: Half }], Outputs: [ { Name: out, Location: Device, Dimensions: [4,1,256] }], PluginType: AsymKVAttention, PluginVersion: "1", StreamId: 0
Name: moe_0_myl6_4, LayerType: custom_layer, Inputs: [ { Name: x_myl6, Dimensions: [4,128], Strides: [128,1] }], Outputs: [ { Name: moe.0, Dimensions: [4,128] }]
Name: copy_0, LayerType: Reformat, Inputs: [ { Name: a, Location: Device, Dimensions: [1] }], Outputs: []
Name: attention_0 [profile 1], LayerType: PluginV3, Inputs: [ { Name: q [profile 1], Location: Device, Dimensions: [1,128,4,64] }], Outputs: [], PluginType: AsymKVAttention
Name: moe_0 [profile 1]_myl9_2, LayerType: custom_layer, Inputs: [ ], Outputs: []
Name: kernel_myl9_3, LayerType: kgen, Inputs: [ ], Outputs: []

Bindings:
 Name: input_ids, IOMode: Input, DataType: Int32, Dimensions: [-1,-1], Location: Device, IsShapeInferenceIO: false, ProfileInfo: [ { MinShape: [4,1], OptShape: [4,1], MaxShape: [4,1], Format: x }, { MinShape: [1,128], OptShape: [1,128], MaxShape: [1,128], Format: x }]
 Name: logits, IOMode: Output, DataType: Float, Dimensions: [4,256], Location: Device, IsShapeInferenceIO: false, ProfileInfo: [ { Format: x }, { Format: x }]
"""  # noqa: E501


def test_layers_of_both_profiles_are_read():
    log = parse_log(LOG)
    assert [(layer.name, layer.profile) for layer in log.layers] == [
        ("attention_0", 0),
        ("moe_0", 0),
        ("copy_0", 0),
        ("attention_0", 1),
        ("moe_0", 1),
        ("kernel_myl9_3", 1),
    ]
    assert log.layers[0].plugin == "AsymKVAttention"
    assert log.layers[0].tensors == ("q", "out")
    assert log.layers[3].tensors == ("q",)
    assert [layer.name for layer in log.layers if layer.is_copy] == ["copy_0"]


def test_memory_is_read():
    log = parse_log(LOG)
    assert (log.activation_bytes, log.scratch_bytes, log.weights_bytes) == ([200, 400], [100, 300], 50)


def test_bindings_are_read():
    ids, logits = parse_log(LOG).bindings
    assert (ids.name, ids.mode, ids.dtype, ids.shapes) == ("input_ids", "Input", "Int32", ((4, 1), (1, 128)))
    assert (logits.mode, logits.shapes) == ("Output", ((4, 256),))


def test_causes_put_our_plugins_first():
    text = (
        "[VERBOSE] fine\n"
        "[ERROR] ModelImporter.cpp:100: While parsing node 3\nmore lines\n"
        "[moec] Experts 'moe_1': attribute 'gated' is missing\n"
        "[ERROR] catchCudaError: no driver\n"
        "[INTERNAL_ERROR] assertion failed\n"
    )
    assert causes(text) == [
        "Experts 'moe_1': attribute 'gated' is missing",
        "ModelImporter.cpp:100: While parsing node 3",
        "assertion failed",
    ]


def test_an_empty_log_has_no_causes():
    assert causes("") == []
    assert parse_log("").layers == []
