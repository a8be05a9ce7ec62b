//! Precedence of the sources of settings, and the error text for each mistake.

use super::*;

/// Names and texts of variables.
type Variables<'a> = &'a [(&'a str, &'a str)];

fn flag(words: &str) -> Flag {
    match words.strip_prefix("-x ") {
        None => Flag::set(words).unwrap(),
        Some(words) => {
            let (name, text) = words.split_once('=').unwrap();
            Flag::exported(&(name.to_string(), text.to_string())).unwrap().unwrap()
        }
    }
}

fn resolve(flags: &[&str], environment: Variables, file: &str) -> Result<Settings> {
    let flags: Vec<Flag> = flags.iter().map(|words| flag(words)).collect();
    let own = |name: &str| {
        let found = environment.iter().find(|(is, _)| *is == name);
        found.map(|(_, text)| OsString::from(text))
    };
    Settings::resolve(&flags, own, Some(File::parse("s.toml".into(), file)?))
}

#[test]
fn flag_goes_before_variable_before_file_before_default() {
    let file = "peer_timeout = \"3s\"";
    let variable = ("LANDBRIDGE_PEER_TIMEOUT", "2s");
    let exported = "-x LANDBRIDGE_PEER_TIMEOUT=4s";
    let rows: [(&[&str], Variables, &str, &str); 9] = [
        (&[], &[], "", "60s default"),
        (&[], &[], file, "3s s.toml, line 1"),
        (&[], &[variable], file, "2s environment"),
        (&[], &[("LANDBRIDGE_PEER_TIMEOUT", "")], file, "3s s.toml, line 1"),
        (&["peer_timeout=1s"], &[variable], file, "1s --set"),
        (&["peer_timeout=1s", "peer_timeout= 5s"], &[variable], file, "5s --set"),
        (&[exported], &[variable], file, "4s -x"),
        (&[exported, "peer_timeout=1s"], &[variable], file, "1s --set"),
        (&["peer_timeout="], &[variable], file, "60s --set"),
    ];
    for (flags, environment, file, expected) in rows {
        let settings = resolve(flags, environment, file).unwrap();
        let found = settings.rows.iter().find(|it| *it.row == setting::PEER_TIMEOUT).unwrap();
        assert_eq!(
            format!("{} {}", found.text, found.source),
            expected,
            "{flags:?} {environment:?}"
        );
        let is_said = settings.variables().any(|(name, _)| name == "LANDBRIDGE_PEER_TIMEOUT");
        assert_eq!(is_said, found.source != SettingSource::Default);
    }
}

#[test]
fn what_nobody_says_is_not_handed_on() {
    let pairs = |flags: &[&str]| {
        let settings = resolve(flags, &[], "").unwrap();
        settings.variables().map(|(name, text)| format!("{name}={text}")).collect::<Vec<_>>()
    };
    assert_eq!(pairs(&[]), [""; 0]);
    assert_eq!(
        pairs(&["wan_streams=4", "rails_exclude=", "log="]),
        ["LANDBRIDGE_LOG=off", "LANDBRIDGE_RAILS_EXCLUDE=", "LANDBRIDGE_WAN_STREAMS=4"]
    );
}

#[test]
fn changed_is_what_has_another_value_not_another_text() {
    let settings = resolve(&["peer_timeout=1min", "udp=on"], &[("FI_LOG_LEVEL", "info")], "");
    let settings = settings.unwrap();
    let changed: Vec<_> = settings.changed().map(|it| it.row.name).collect();
    assert_eq!(changed, ["udp"]);
}

#[test]
fn changed_is_also_what_is_only_a_text() {
    let flags = ["criu=/opt/criu", "recover_dir=/var/tmp", "checkpoint_dir=auto"];
    let settings = resolve(&flags, &[], "checkpoint_dir = \"/scratch\"").unwrap();
    let changed: Vec<_> = settings
        .changed()
        .filter(|it| it.source != SettingSource::Launcher)
        .map(|it| it.row.name)
        .collect();
    assert_eq!(changed, ["criu", "recover_dir"]);
}

#[test]
fn the_launcher_asks_for_warnings_unless_somebody_says_something() {
    let rows: [(Variables, &str, &str); 5] = [
        (&[], "", "warn landbridge run"),
        (&[], "log = \"debug\"", "debug s.toml, line 1"),
        (&[("FI_LOG_LEVEL", "info")], "", "off default"),
        (&[("LANDBRIDGE_LOG", "")], "", "off default"),
        (&[("LANDBRIDGE_LOG", "info")], "", "info environment"),
    ];
    for (environment, file, expected) in rows {
        let settings = resolve(&[], environment, file).unwrap();
        let log = settings.rows.iter().find(|it| *it.row == setting::LOG).unwrap();
        assert_eq!(format!("{} {}", log.text, log.source), expected, "{environment:?}");
    }
}

#[test]
fn a_flag_that_is_wrong_is_explained() {
    let rows = [
        ("peer_timeout", "--set peer_timeout: write NAME=VALUE"),
        (
            "peer_timout=5s",
            "--set peer_timout=5s: there is no setting \"peer_timout\"; peer_timeout",
        ),
        ("PEER_TIMEOUT=5s", "peer_timeout is meant?"),
        ("relays=x", "`landbridge settings` lists them all"),
        ("=5s", "there is no setting \"\""),
        ("peer_timeout=5", "--set: peer_timeout: \"5\" has no unit: write 5s or 5ms"),
        ("recover_dir=images", "--set: recover_dir: \"images\" is not an absolute path"),
        ("key=00", "key is what the launcher tells each process"),
        ("settings=x", "give --settings FILE, or set LANDBRIDGE_SETTINGS"),
    ];
    for (words, expected) in rows {
        let error = Flag::set(words).unwrap_err().to_string();
        assert!(error.contains(expected), "{words}: {error}");
    }
    // A user of a setting's own option need not know the setting's name.
    let error = Flag::special("--checkpoint", &setting::CHECKPOINT, "0").unwrap_err().to_string();
    assert_eq!(error, "--checkpoint: \"0\" has no unit: write 0s or 0ms");
    let exported = |name: &str, text: &str| Flag::exported(&(name.to_string(), text.to_string()));
    assert!(exported("LANDBRIDGE_UDP", "maybe").unwrap().is_err());
    assert!(exported("LANDBRIDGE_INDEX", "3").is_none() && exported("PATH", "/bin").is_none());
}

#[test]
fn a_wrong_variable_is_reported_also_behind_a_flag() {
    let variable = ("LANDBRIDGE_RETAIN", "lots");
    for flags in [&[][..], &["retain=1GiB"]] {
        let error = resolve(flags, &[variable], "").unwrap_err().to_string();
        assert!(error.starts_with("LANDBRIDGE_RETAIN: \"lots\" is no size"), "{error}");
    }
}

#[test]
fn a_misspelt_variable_is_distinguished_from_one_of_somebody_else() {
    assert_eq!(right_name("LANDBRIDGE_PEER_TIMOUT").as_deref(), Some("LANDBRIDGE_PEER_TIMEOUT"));
    for name in ["LANDBRIDGE_PEER_TIMEOUT", "LANDBRIDGE_LAB", "LANDBRIDGE_TEST_MARK", "PEER_TIMOUT"]
    {
        assert_eq!(right_name(name), None, "{name}");
    }
}

#[test]
fn relays_get_what_they_read() {
    let job = ["LANDBRIDGE_WAN_STREAMS", "LANDBRIDGE_PEER_TIMEOUT", "LANDBRIDGE_UDP", "PATH"];
    let job = job.map(|name| (name.to_string(), "x".to_string()));
    let names: Vec<_> = for_relays(&job).map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["LANDBRIDGE_WAN_STREAMS", "LANDBRIDGE_PEER_TIMEOUT"]);
}
