//! Checks settings: lists settings without their default value, and reports invalid or misspelt
//! ones.

use anyhow::Result;

use super::Finding;
use crate::settings::{SettingSource, Settings, misspelt};

pub fn check(found: &Result<Settings>) -> Vec<Finding> {
    let mut findings = match found {
        Ok(settings) => of(settings),
        Err(error) => {
            vec![Finding::bad(format!("{error:#}"), "correct it: no job starts before")]
        }
    };
    findings.extend(misspelt().into_iter().map(|(is, right)| {
        let advice = format!("{right} is meant? `landbridge settings` lists what there is");
        Finding::notice(format!("{is} is set, is no setting and is not heeded"), advice)
    }));
    findings
}

fn of(settings: &Settings) -> Vec<Finding> {
    // Settings that the launcher sets by itself are left out.
    let changed = settings.changed().filter(|it| it.source != SettingSource::Launcher);
    let mut findings: Vec<Finding> = changed
        .map(|it| {
            let (name, text, source) = (it.row.name, &it.text, &it.source);
            Finding::good(format!("{name} = {text} ({source}; default: {})", it.row.default))
        })
        .collect();
    if findings.is_empty() {
        findings.push(Finding::good("all as by default; `landbridge settings` lists them"));
    }
    findings
}
