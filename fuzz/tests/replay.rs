//! Every input of the corpus goes through the function that the fuzzer calls with it.

use std::path::{Path, PathBuf};

#[test]
fn every_input_of_the_corpus_is_survived() {
    for (name, target) in landbridge_fuzz::TARGETS {
        let mut inputs: Vec<PathBuf> = std::fs::read_dir(corpus(name))
            .unwrap_or_else(|error| panic!("corpus of {name}: {error}"))
            .map(|entry| entry.unwrap().path())
            .collect();
        inputs.sort();
        assert!(inputs.len() >= 2, "the corpus of {name} is empty");
        for input in inputs {
            println!("{}", input.display());
            target(&std::fs::read(&input).unwrap());
        }
    }
}

/// Each input with every byte changed, one at a time: cheap, and no fuzzer needed.
#[test]
fn neighbours_of_good_input_are_survived() {
    for (name, target) in landbridge_fuzz::TARGETS {
        for (_, _, seed) in landbridge_fuzz::seeds().iter().filter(|(of, ..)| *of == name) {
            for at in 0..seed.len() {
                for value in [0, 1, 0x7f, 0x80, 0xff] {
                    let mut bytes = seed.clone();
                    bytes[at] = value;
                    target(&bytes);
                }
                target(&seed[..at]);
            }
        }
    }
}

/// The good input is in the corpus. `LANDBRIDGE_WRITE_SEEDS=1 cargo test` writes it.
#[test]
fn the_corpus_holds_good_input() {
    let write = std::env::var_os("LANDBRIDGE_WRITE_SEEDS").is_some();
    for (target, name, bytes) in landbridge_fuzz::seeds() {
        let path = corpus(target).join(name);
        if write {
            std::fs::create_dir_all(corpus(target)).unwrap();
            std::fs::write(&path, &bytes).unwrap();
        }
        let stored = std::fs::read(&path).unwrap_or_default();
        assert!(
            stored == bytes,
            "{} is not what the code makes today; LANDBRIDGE_WRITE_SEEDS=1 cargo test writes it anew",
            path.display()
        );
    }
}

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target)
}
