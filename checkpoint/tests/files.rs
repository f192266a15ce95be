//! Small files made by hand: what is read from them, and how each kind of fault is named.

#![expect(clippy::unwrap_used, reason = "a test's panic is its report")]

use checkpoint::testing::GgufWriter;
use checkpoint::{Checkpoint, Encode, Error, RopeScaling, TensorType};
use expect_test::{Expect, expect};

fn open(file: &GgufWriter) -> Result<Checkpoint, Error> {
    open_bytes(&file.to_bytes())
}

fn open_bytes(bytes: &[u8]) -> Result<Checkpoint, Error> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    Checkpoint::open(&path)
}

fn check_refused(file: &GgufWriter, expected: Expect) {
    expected.assert_eq(&open(file).unwrap_err().to_string());
}

/// A tiny model of the `llama` architecture.
fn llama() -> GgufWriter {
    GgufWriter::new()
        .string("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32("llama.context_length", 128)
        .u32("llama.embedding_length", 8)
        .u32("llama.feed_forward_length", 16)
        .u32("llama.attention.head_count", 2)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .f32_tensor("token_embd.weight", &[8, 3], &[0.5; 24])
}

mod container {
    use super::*;

    #[test]
    fn both_versions_and_any_alignment_are_read() {
        for version in [2, 3] {
            for alignment in [8, 32, 4096] {
                let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
                let file = GgufWriter::new()
                    .version(version)
                    .alignment(alignment)
                    .f32_tensor("first", &[3, 2], &values)
                    .tensor("second", TensorType::F16, &[2], vec![0, 0x3c, 0, 0x40]);
                let checkpoint = open(&file).unwrap();
                let first = checkpoint.tensor("first").unwrap();
                assert_eq!((first.name, first.rows, first.cols), ("first", 2, 3));
                assert_eq!(first.to_f32(), values);
                assert_eq!(first.row_bytes(1).len(), 12);
                let mut row = [0.0; 3];
                first.dequantize_row(1, &mut row);
                assert_eq!(row, [4.0, 5.0, 6.0]);
                let second = checkpoint.tensor("second").unwrap();
                assert_eq!((second.rows, second.to_f32()), (1, vec![1.0, 2.0]));
            }
        }
    }

    #[test]
    fn higher_dimensions_fold_into_rows() {
        let checkpoint = open(&GgufWriter::new().f32_tensor("t", &[2, 3, 4], &[0.0; 24])).unwrap();
        let tensor = checkpoint.tensor("t").unwrap();
        assert_eq!((tensor.rows, tensor.cols), (12, 2));
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Checkpoint::open("/no/such/model.gguf".as_ref()).unwrap_err().to_string();
        assert!(error.starts_with("/no/such/model.gguf: "), "{error}");
    }

    #[test]
    fn another_format_is_refused() {
        for (bytes, expected) in [
            (
                &b""[..],
                expect![
                    "gguf magic: expected at most the 0 bytes that remain at offset 0, found a length of 4"
                ],
            ),
            (b"GGML\x03\0\0\0", expect![[r#"gguf magic: expected the bytes "GGUF", found GGML"#]]),
            (b"GGUF\x01\0\0\0", expect!["gguf version: expected 2 or 3, little-endian, found 1"]),
            (b"GGUF\0\0\0\x03", expect!["gguf version: expected 2 or 3, little-endian, found 50331648"]),
        ] {
            expected.assert_eq(&open_bytes(bytes).unwrap_err().to_string());
        }
    }

    #[test]
    fn false_counts_run_out_of_bytes() {
        let header = |tensors: u64, values: u64| {
            [&b"GGUF\x03\0\0\0"[..], &tensors.to_le_bytes(), &values.to_le_bytes()].concat()
        };
        let error = open_bytes(&header(u64::MAX, 0)).unwrap_err().to_string();
        expect!["gguf name of tensor 0: expected at most the 0 bytes that remain at offset 24, found a length of 8"]
            .assert_eq(&error);
        let error = open_bytes(&header(0, u64::MAX)).unwrap_err().to_string();
        expect![
            "gguf metadata key 0: expected at most the 0 bytes that remain at offset 24, found a length of 8"
        ]
        .assert_eq(&error);
    }

    #[test]
    fn false_lengths_of_values_are_refused() {
        let huge = [&4_u32.to_le_bytes()[..], &u64::MAX.to_le_bytes()].concat();
        check_refused(
            &GgufWriter::new().raw("k", 9, &huge),
            expect![
                "gguf metadata k: expected at most the 0 bytes that remain at offset 49, found a length of 18446744073709551615"
            ],
        );
        let strings = [&8_u32.to_le_bytes()[..], &(1_u64 << 60).to_le_bytes()].concat();
        check_refused(
            &GgufWriter::new().raw("k", 9, &strings),
            expect![
                "gguf metadata k: expected at most the 0 bytes that remain at offset 49, found a length of 8"
            ],
        );
        check_refused(
            &GgufWriter::new().raw("k", 8, &9_u64.to_le_bytes()),
            expect![
                "gguf metadata k: expected at most the 0 bytes that remain at offset 45, found a length of 9"
            ],
        );
        check_refused(
            &GgufWriter::new().raw("k", 13, &[0; 8]),
            expect!["gguf metadata k: expected a value type from 0 to 12, found type 13"],
        );
        check_refused(
            &GgufWriter::new().raw("k", 9, &9_u32.to_le_bytes()),
            expect!["gguf metadata k: expected an array of plain values, found an array of arrays"],
        );
        check_refused(
            &GgufWriter::new().u32("k", 1).u32("k", 2),
            expect!["gguf metadata k: expected each key once, found the key a second time"],
        );
        check_refused(
            &GgufWriter::new().u32("general.alignment", 24),
            expect!["metadata general.alignment: expected a power of two up to 1048576, found 24"],
        );
    }

    #[test]
    fn tensors_that_cannot_be_are_refused() {
        let tensor = |dims: &[u64]| GgufWriter::new().tensor("t", TensorType::Q8_0, dims, vec![0; 34]);
        check_refused(&tensor(&[]), expect!["gguf tensor t: expected 1 to 4 dimensions, found 0"]);
        check_refused(
            &tensor(&[32, 1, 1, 1, 1]),
            expect!["gguf tensor t: expected 1 to 4 dimensions, found 5"],
        );
        check_refused(
            &tensor(&[32, 0]),
            expect!["gguf tensor t: expected from 1 to 2^48 elements, found dimensions [32, 0, 1, 1]"],
        );
        check_refused(
            &tensor(&[32, 1 << 40, 1 << 40]),
            expect![
                "gguf tensor t: expected from 1 to 2^48 elements, found dimensions [32, 1099511627776, 1099511627776, 1]"
            ],
        );
        check_refused(
            &tensor(&[33]),
            expect!["gguf tensor t: expected a multiple of 32 columns for Q8_0, found 33"],
        );
        check_refused(
            &tensor(&[64]),
            expect![
                "gguf tensor t: expected to end inside the file's 98 bytes, found 68 bytes at data offset 0"
            ],
        );
        check_refused(
            &GgufWriter::new().f32_tensor("t", &[1], &[0.0]).f32_tensor("t", &[1], &[0.0]),
            expect!["gguf tensor t: expected each name once, found the name a second time"],
        );
    }

    #[test]
    fn places_that_cannot_be_are_refused() {
        // Tensor "b" is declared larger than what was written for it, so that it reaches into "c".
        let file = GgufWriter::new().tensor("b", TensorType::F32, &[16], vec![0; 32]).f32_tensor(
            "c",
            &[8],
            &[0.0; 8],
        );
        check_refused(
            &file,
            expect!["gguf tensor c: expected a place of its own, found an overlap with tensor b"],
        );

        let file = GgufWriter::new().f32_tensor("a", &[1], &[0.0]).to_bytes();
        let offset_at = 24 + 8 + 1 + 4 + 8 + 4;
        let mut misaligned = file.clone();
        misaligned[offset_at] = 4;
        let error = open_bytes(&misaligned).unwrap_err().to_string();
        expect!["gguf tensor a: expected an offset that is a multiple of 32, found 4"].assert_eq(&error);
        let mut outside = file;
        outside[offset_at..offset_at + 8].copy_from_slice(&(u64::MAX - 31).to_le_bytes());
        let error = open_bytes(&outside).unwrap_err().to_string();
        expect!["gguf tensor a: expected to end inside the file's 68 bytes, found 4 bytes at data offset 18446744073709551584"]
            .assert_eq(&error);
    }

    #[test]
    fn a_type_that_cannot_be_read_stops_only_its_own_tensor() {
        let file = GgufWriter::new()
            .raw_tensor("k", 12, &[256], vec![0; 144])
            .raw_tensor("new", 99, &[7], vec![0; 7])
            .f32_tensor("plain", &[1], &[1.5]);
        let checkpoint = open(&file).unwrap();
        assert_eq!(checkpoint.tensor("plain").unwrap().to_f32(), [1.5]);
        let message = |name| checkpoint.tensor(name).unwrap_err().to_string();
        assert!(message("k").starts_with("tensor k: type Q4_K is not supported"), "{}", message("k"));
        assert!(
            message("new").starts_with("tensor new: type number 99 is not supported"),
            "{}",
            message("new")
        );
    }
}

mod config {
    use super::*;

    fn check_config_refused(file: &GgufWriter, expected: Expect) {
        expected.assert_eq(&open(file).unwrap().config().unwrap_err().to_string());
    }

    #[test]
    fn what_a_file_leaves_out_has_the_format_s_default() {
        let config = open(&llama()).unwrap().config().unwrap();
        assert_eq!((config.kv_heads, config.head_dim, config.rope_dim, config.vocab_size), (2, 4, 4, 3));
        assert_eq!((config.rope_base, config.rope_scaling), (10_000.0, RopeScaling::None));
        assert!(config.tied_embeddings && !config.attention_bias && !config.attention_output_bias);
    }

    #[test]
    fn knobs_follow_tensors_and_metadata() {
        let file = llama()
            .u32("llama.attention.key_length", 16)
            .u32("llama.attention.value_length", 16)
            .u32("llama.attention.head_count_kv", 1)
            .u32("llama.rope.dimension_count", 8)
            .string("llama.rope.scaling.type", "linear")
            .f32("llama.rope.scaling.factor", 4.0)
            .f32_tensor("output.weight", &[8, 3], &[0.0; 24])
            .f32_tensor("blk.0.attn_q.bias", &[32], &[0.0; 32])
            .f32_tensor("blk.0.attn_output.bias", &[8], &[0.0; 8])
            .f32_tensor("blk.0.ffn_up.bias", &[16], &[0.0; 16]);
        let config = open(&file).unwrap().config().unwrap();
        assert_eq!((config.kv_heads, config.head_dim, config.rope_dim), (1, 16, 8));
        assert_eq!(config.rope_scaling, RopeScaling::Linear { factor: 4.0 });
        assert!(!config.tied_embeddings && config.attention_bias && config.attention_output_bias);
        assert!(config.ffn_bias);
        let file = llama().f32_tensor("rope_freqs.weight", &[2], &[1.0, 8.0]);
        assert_eq!(open(&file).unwrap().config().unwrap().rope_scaling, RopeScaling::Factors);
    }

    #[test]
    fn what_no_decoder_can_do_is_named() {
        check_config_refused(
            &GgufWriter::new(),
            expect!["metadata general.architecture: missing, expected a string"],
        );
        check_config_refused(
            &GgufWriter::new().string("general.architecture", "mamba"),
            expect!["metadata general.architecture: mamba is not supported, expected llama"],
        );
        check_config_refused(
            &GgufWriter::new().string("general.architecture", "llama"),
            expect!["metadata llama.block_count: missing, expected an integer of at least 1"],
        );
        check_config_refused(
            &llama().u32("llama.attention.head_count_kv", 3),
            expect![
                "metadata llama.attention.head_count_kv: expected a divisor of the 2 query heads, found 3"
            ],
        );
        check_config_refused(
            &llama().u32("llama.expert_count", 8),
            expect!["metadata llama.expert_count: expected a dense model, 0 experts, found 8"],
        );
        check_config_refused(
            &llama().string("llama.rope.scaling.type", "yarn"),
            expect!["metadata llama.rope.scaling.type: expected none or linear, found yarn"],
        );
        check_config_refused(
            &llama().u32("llama.rope.dimension_count", 6),
            expect![
                "metadata llama.rope.dimension_count: expected an even number up to the head's 4 elements, found 6"
            ],
        );
        check_config_refused(
            &llama().u32("llama.attention.value_length", 2),
            expect!["metadata llama.attention.value_length: expected the length of a key, 4, found 2"],
        );
        check_config_refused(
            &llama().f32("llama.rope.freq_base", f32::NAN),
            expect!["metadata llama.rope.freq_base: expected a positive finite float, found NaN"],
        );
        check_config_refused(
            &llama().string("llama.rope.dimension_count", "4"),
            expect!["metadata llama.rope.dimension_count: expected an integer, found a string"],
        );
    }
}

mod tokenizer {
    use super::*;

    /// Byte-level pieces of "low lower", merged over l o w, e r.
    fn byte_level() -> GgufWriter {
        GgufWriter::new()
            .string("tokenizer.ggml.model", "gpt2")
            .string("tokenizer.ggml.pre", "gpt-2")
            .strings(
                "tokenizer.ggml.tokens",
                &["l", "o", "w", "e", "r", "Ġ", "lo", "low", "er", "Ġlow", "<|im_end|>", "[u]"],
            )
            .i32s("tokenizer.ggml.token_type", &[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 4])
            .strings("tokenizer.ggml.merges", &["l o", "lo w", "e r", "Ġ low"])
    }

    /// A SentencePiece vocabulary with three byte tokens.
    fn sentence_piece() -> GgufWriter {
        let tokens = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "h", "i", "▁h", "hi", "▁hi"];
        GgufWriter::new()
            .string("tokenizer.ggml.model", "llama")
            .strings("tokenizer.ggml.tokens", &tokens)
            .i32s("tokenizer.ggml.token_type", &[2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 1])
            .f32s("tokenizer.ggml.scores", &[0.0, 0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0])
            .u32("tokenizer.ggml.unknown_token_id", 0)
            .u32("tokenizer.ggml.bos_token_id", 1)
            .u32("tokenizer.ggml.eos_token_id", 2)
    }

    const PLAIN: Encode = Encode { add_bos: false, parse_special: false };
    const SPECIAL: Encode = Encode { add_bos: true, parse_special: true };

    #[test]
    fn byte_level_merges_in_order() {
        let text = open(&byte_level()).unwrap().bundle().unwrap().open().unwrap();
        assert_eq!(text.encode("low lower", PLAIN).unwrap(), [7, 9, 8]);
        assert_eq!(text.decode(&[7, 9, 8, 99], false), "low lower");
        assert_eq!(text.token_bytes(9), Some(&b" low"[..]));
        // What a user defined is whole in any case, a special token only when asked.
        assert_eq!(text.encode("low[u]low", PLAIN).unwrap(), [7, 11, 7]);
        assert_eq!(text.encode("low<|im_end|>", SPECIAL).unwrap(), [7, 10]);
        assert_eq!(text.eos_ids(), [10]);
        assert!(text.is_special(10) && !text.is_special(11) && !text.is_special(99));
        assert_eq!((text.vocab_size(), text.has_chat_template()), (12, false));
    }

    #[test]
    fn sentence_piece_merges_by_score_and_falls_back_to_bytes() {
        let text = open(&sentence_piece()).unwrap().bundle().unwrap().open().unwrap();
        // "▁hi": "hi" (-1) is joined before "▁h" (-2), then "▁hi".
        assert_eq!(text.encode("hi", PLAIN).unwrap(), [10]);
        assert_eq!(text.encode("hé", SPECIAL).unwrap(), [1, 8, 3, 4]);
        assert_eq!(text.encode("hi</s>hi", SPECIAL).unwrap(), [1, 10, 2, 10]);
        assert_eq!(text.encode("z", PLAIN).unwrap(), [5, 0]);
        assert_eq!(text.encode("", SPECIAL).unwrap(), [1]);
        assert_eq!(text.decode(&[1, 8, 3, 4, 2], true), " hé");
        assert_eq!(text.decode(&[1, 8, 3, 2], false), "<s> h\u{fffd}</s>");
        let bare = open(&sentence_piece().bool("tokenizer.ggml.add_space_prefix", false)).unwrap();
        assert_eq!(bare.bundle().unwrap().open().unwrap().encode("hi hi", PLAIN).unwrap(), [9, 10]);
    }

    #[test]
    fn every_family_of_pre_tokenizers_builds() {
        for (pre, expected) in [
            ("gpt-2", vec!["12345", " lo"]),
            ("smollm", vec!["1", "2", "3", "4", "5", " lo"]),
            ("llama-bpe", vec!["123", "45", " lo"]),
            ("qwen2", vec!["1", "2", "3", "4", "5", " lo"]),
            ("default", vec!["123", "45", " lo"]),
        ] {
            // Every digit run is a token, so the tokens show where the words were cut.
            let digits =
                ["1", "2", "3", "4", "5", "12", "45", "123", "1234", "12345", "Ġ", "l", "o", "lo", "Ġlo"];
            let file = GgufWriter::new()
                .string("tokenizer.ggml.model", "gpt2")
                .string("tokenizer.ggml.pre", pre)
                .strings("tokenizer.ggml.tokens", &digits)
                .strings("tokenizer.ggml.merges", &["1 2", "12 3", "4 5", "123 4", "123 45", "l o", "Ġ lo"]);
            let text = open(&file).unwrap().bundle().unwrap().open().unwrap();
            let ids = text.encode("12345 lo", PLAIN).unwrap();
            let pieces: Vec<String> = ids.iter().map(|id| text.decode(&[*id], false)).collect();
            assert_eq!(pieces, expected, "{pre}");
        }
    }

    fn check_bundle_refused(file: &GgufWriter, expected: Expect) {
        expected.assert_eq(&open(file).unwrap().bundle().unwrap_err().to_string());
    }

    #[test]
    fn a_tokenizer_that_cannot_be_is_named() {
        check_bundle_refused(
            &GgufWriter::new(),
            expect!["metadata tokenizer.ggml.model: missing, expected a string"],
        );
        check_bundle_refused(
            &sentence_piece().u32("tokenizer.ggml.eot_token_id", 11),
            expect!["tokenizer bundle special ids: expected an id below 11, found 11"],
        );
        let gpt2 = |pre: &str, tokens: &[&str], merges: &[&str]| {
            GgufWriter::new()
                .string("tokenizer.ggml.model", "gpt2")
                .string("tokenizer.ggml.pre", pre)
                .strings("tokenizer.ggml.tokens", tokens)
                .strings("tokenizer.ggml.merges", merges)
        };
        check_bundle_refused(
            &gpt2("klingon", &["a"], &[]),
            expect![
                "metadata tokenizer.ggml.pre: expected one of the gpt-2, smollm, llama-bpe and qwen2 families, or default, found klingon"
            ],
        );
        check_bundle_refused(
            &gpt2("gpt-2", &["a", "b"], &["a c"]),
            expect!["metadata tokenizer.ggml.merges[0]: expected two tokens and a space between, found a c"],
        );
        check_bundle_refused(
            &gpt2("gpt-2", &["a", "b"], &["a b"]),
            expect![[r#"tokenizer bundle merges: expected a pair that joins into a token, found "ab""#]],
        );
        check_bundle_refused(
            &gpt2("gpt-2", &["a", "b", "a"], &[]),
            expect![[r#"tokenizer bundle tokens: expected each token once, found "a" as 0 and as 2"#]],
        );
        check_bundle_refused(
            &gpt2("gpt-2", &["a", "b"], &[]).i32s("tokenizer.ggml.token_type", &[1]),
            expect!["tokenizer bundle kinds: expected 2, one per token, found 1"],
        );
        check_bundle_refused(
            &gpt2("gpt-2", &["a", "b"], &[]).i32s("tokenizer.ggml.token_type", &[1, 7]),
            expect!["metadata tokenizer.ggml.token_type[1]: expected 1 to 6, found 7"],
        );
        check_bundle_refused(
            &gpt2("gpt-2", &["a", "<0xZZ>"], &[]).i32s("tokenizer.ggml.token_type", &[1, 6]),
            expect!["tokenizer bundle tokens: expected <0xNN> for byte token 1, found <0xZZ>"],
        );
    }

    #[test]
    fn lengths_that_would_cost_time_are_refused() {
        let long = "a".repeat(1025);
        check_bundle_refused(
            &GgufWriter::new()
                .string("tokenizer.ggml.model", "llama")
                .strings("tokenizer.ggml.tokens", &[long.as_str()])
                .f32s("tokenizer.ggml.scores", &[0.0]),
            expect!["tokenizer bundle tokens: expected at most 1024 bytes each, found 1025"],
        );
        check_bundle_refused(
            &sentence_piece().u32("tokenizer.ggml.eom_token_id", u32::MAX),
            expect!["tokenizer bundle special ids: expected an id below 11, found 4294967295"],
        );
    }

    #[test]
    fn bytes_that_are_no_bundle_are_refused() {
        let refused = |bytes: &[u8]| checkpoint::TokenizerBundle::from_bytes(bytes).unwrap_err().to_string();
        assert!(refused(b"").starts_with("tokenizer bundle json: expected the fields of version 1"));
        let bundle = open(&byte_level()).unwrap().bundle().unwrap();
        let json = String::from_utf8(bundle.to_bytes()).unwrap();
        let later = json.replace("\"version\":1", "\"version\":2");
        assert_eq!(refused(later.as_bytes()), "tokenizer bundle version: expected 1, found 2");
        let cut = &json.as_bytes()[..json.len() - 1];
        assert!(refused(cut).contains("EOF"));
    }

    #[test]
    fn a_template_that_does_not_compile_fails_only_chats() {
        let file = byte_level().string("tokenizer.chat_template", "{% if %}");
        let text = open(&file).unwrap().bundle().unwrap().open().unwrap();
        assert!(text.has_chat_template());
        let error = text.render_chat(&serde_json::json!([]), &serde_json::json!({})).unwrap_err().to_string();
        assert!(error.starts_with("chat template: syntax error"), "{error}");
    }
}

mod fingerprint {
    use super::*;

    #[test]
    fn the_whole_file_is_digested_and_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let (model, cache) = (dir.path().join("model.gguf"), dir.path().join("cache"));
        // An empty header: "GGUF", 3, 0, 0; its digest as sha256sum prints it.
        GgufWriter::new().write(&model);
        let expected = "a4e5e156ddec27e2";
        let checkpoint = Checkpoint::open(&model).unwrap();
        assert_eq!(checkpoint.path(), model);
        let digest = checkpoint.fingerprint().unwrap();
        assert_eq!(&digest.to_string()[..16], expected);
        assert_eq!(checkpoint.fingerprint_cached(Some(&cache)).unwrap(), digest);

        let entries: Vec<_> = std::fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path()).collect();
        let [entry] = &entries[..] else { panic!("one entry, found {entries:?}") };
        assert_eq!(std::fs::read_to_string(entry).unwrap(), format!("{digest}\n"));
        // The cache is believed, unless it is not whole.
        let other = "ab".repeat(32);
        std::fs::write(entry, &other).unwrap();
        assert_eq!(checkpoint.fingerprint_cached(Some(&cache)).unwrap().to_string(), other);
        std::fs::write(entry, &other[..63]).unwrap();
        assert_eq!(checkpoint.fingerprint_cached(Some(&cache)).unwrap(), digest);
        // Another file has another identity, even under the same name.
        std::fs::remove_file(&model).unwrap();
        llama().write(&model);
        let replaced = Checkpoint::open(&model).unwrap().fingerprint_cached(Some(&cache)).unwrap();
        assert_ne!(replaced, digest);
        assert_eq!(checkpoint.fingerprint().unwrap(), digest, "the open file is still the old one");
    }
}
