//! Tests of reading weights: small files of every layout, and every way in which a file can be wrong.

use std::path::Path;

use ::safetensors::tensor::TensorView;
use ::safetensors::{Dtype, serialize_to_file};
use tempfile::TempDir;

use super::*;

/// A file with a tensor `[2, 3]` of 0.5, 1.5, ... and an unrelated buffer in front of it.
fn write(path: &Path, name: &str, dtype: Dtype) {
    let values = (0..6).map(|index| index as f32 + 0.5);
    let bytes: Vec<u8> = match dtype {
        Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
        Dtype::F16 => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
        Dtype::BF16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
        _ => vec![0; 6 * 8],
    };
    let tensor = TensorView::new(dtype, vec![2, 3], &bytes).unwrap();
    let buffer = TensorView::new(Dtype::U8, vec![16], &[7; 16]).unwrap();
    serialize_to_file([("h.0.attn.bias", buffer), (name, tensor)], None, path).unwrap();
}

fn error(result: Result<impl std::fmt::Debug, TrainError>, folder: &TempDir) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error, TrainError::Input(_)));
    error.to_string().replace(folder.path().to_str().unwrap(), "FOLDER")
}

#[test]
fn reads_every_data_type_under_both_key_layouts() {
    let folder = TempDir::new().unwrap();
    for (dtype, stored) in [(Dtype::F32, "transformer.wpe.weight"), (Dtype::F16, "wpe.weight"), (Dtype::BF16, "transformer.wpe.weight")] {
        let path = folder.path().join(SINGLE);
        write(&path, stored, dtype);
        for source in [folder.path(), &path] {
            let weights = SafetensorsWeights::open(source).unwrap();
            for asked in ["transformer.wpe.weight", "wpe.weight"] {
                assert_eq!(weights.read(asked, &[2, 3], 0..6).unwrap(), [0.5, 1.5, 2.5, 3.5, 4.5, 5.5], "{dtype:?}");
                assert_eq!(weights.read(asked, &[2, 3], 3..5).unwrap(), [3.5, 4.5], "{dtype:?}");
                assert!(weights.read(asked, &[2, 3], 6..6).unwrap().is_empty());
            }
        }
    }
}

#[test]
fn reads_more_than_one_chunk() {
    let folder = TempDir::new().unwrap();
    let length = 2 * CHUNK + 3;
    let bytes: Vec<u8> = (0..length).flat_map(|index| (index as f32).to_le_bytes()).collect();
    let path = folder.path().join("weights.safetensors");
    serialize_to_file([("wte.weight", TensorView::new(Dtype::F32, vec![length], &bytes).unwrap())], None, &path).unwrap();
    let values = SafetensorsWeights::open(&path).unwrap().read("wte.weight", &[length], 1..length).unwrap();
    assert!(values.iter().enumerate().all(|(index, value)| *value == (index + 1) as f32));
}

fn write_index(folder: &TempDir, entries: &[(&str, &str)]) {
    let map: serde_json::Map<_, _> = entries.iter().map(|(tensor, file)| ((*tensor).to_owned(), (*file).into())).collect();
    std::fs::write(folder.path().join(INDEX), serde_json::json!({"metadata": {}, "weight_map": map}).to_string()).unwrap();
}

#[test]
fn reads_a_folder_with_an_index() {
    let folder = TempDir::new().unwrap();
    write(&folder.path().join("a.safetensors"), "transformer.wte.weight", Dtype::F32);
    write(&folder.path().join("b.safetensors"), "transformer.wpe.weight", Dtype::F16);
    write_index(&folder, &[("transformer.wte.weight", "a.safetensors"), ("transformer.wpe.weight", "b.safetensors")]);
    let weights = SafetensorsWeights::open(folder.path()).unwrap();
    assert_eq!(weights.read("wte.weight", &[2, 3], 1..2).unwrap(), [1.5]);
    assert_eq!(weights.read("wpe.weight", &[2, 3], 5..6).unwrap(), [5.5]);
}

#[test]
fn says_what_is_missing_or_does_not_fit() {
    let folder = TempDir::new().unwrap();
    assert_eq!(error(SafetensorsWeights::open(folder.path()), &folder), "FOLDER holds neither model.safetensors nor model.safetensors.index.json");
    let path = folder.path().join(SINGLE);
    write(&path, "wte.weight", Dtype::F64);
    let weights = SafetensorsWeights::open(&path).unwrap();
    let read = |name: &str, shape: &[usize]| error(weights.read(name, shape, 0..1), &folder);
    assert_eq!(read("transformer.wpe.weight", &[2, 3]), "FOLDER/model.safetensors has no tensor transformer.wpe.weight, which the model needs");
    assert_eq!(read("wte.weight", &[3, 2]), "FOLDER/model.safetensors: tensor wte.weight has shape [2, 3], the model needs [3, 2]");
    assert_eq!(read("wte.weight", &[2, 3]), "FOLDER/model.safetensors: tensor wte.weight has data type F64; F32, F16 and BF16 can be read");
}

#[test]
fn an_index_that_promises_too_much_is_refused() {
    let folder = TempDir::new().unwrap();
    write(&folder.path().join("a.safetensors"), "wte.weight", Dtype::F32);
    write_index(&folder, &[("wte.weight", "a.safetensors"), ("wpe.weight", "a.safetensors")]);
    assert_eq!(
        error(SafetensorsWeights::open(folder.path()), &folder),
        "FOLDER/model.safetensors.index.json cannot be used: it promises the tensor wpe.weight in a.safetensors, which does not hold it"
    );
    write_index(&folder, &[("wte.weight", "gone.safetensors")]);
    assert_eq!(
        error(SafetensorsWeights::open(folder.path()), &folder),
        "cannot read FOLDER/gone.safetensors: No such file or directory (os error 2)"
    );
    write_index(&folder, &[("wte.weight", "../a.safetensors")]);
    assert_eq!(
        error(SafetensorsWeights::open(folder.path()), &folder),
        "FOLDER/model.safetensors.index.json cannot be used: it names the file \"../a.safetensors\", which is not beside it"
    );
}

/// A file cut anywhere, or with bytes glued to its end, is refused when it is opened, never half read.
#[test]
fn a_damaged_file_is_refused_by_name() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join(SINGLE);
    write(&path, "wte.weight", Dtype::F32);
    let whole = std::fs::read(&path).unwrap();
    for length in 0..whole.len() {
        std::fs::write(&path, &whole[..length]).unwrap();
        let message = error(SafetensorsWeights::open(&path), &folder);
        assert!(message.starts_with("FOLDER/model.safetensors cannot be used: "), "{length} bytes: {message}");
    }
    std::fs::write(&path, [whole.as_slice(), b"more"].concat()).unwrap();
    assert!(error(SafetensorsWeights::open(&path), &folder).contains("bytes long where its header says"));
}
