//! Tunables in the configuration.
//!
//! Owns the checks of a value: whose tunable it is, whether it is in its range, and whether it fits the other values of the
//! file. The engine has the names and ranges. Must not know what is running.

use std::collections::BTreeMap;

use engine::tunables::{DeviceTunables, SetTunables, TunableError, number};
use serve::tunables::{Owner, owners};
use toml::Spanned;

use super::mistake::Mistake;
use super::{Config, ConfigError, File, Parser, Values};

/// The tunables of a section, with their places in the file.
type Spans = BTreeMap<String, Spanned<toml::Value>>;

impl Parser<'_> {
    /// The tunables of a section as text. `of`: whose they have to be; `None` for either.
    pub(super) fn values(&self, values: &Spans, of: Option<Owner>) -> Result<Values, ConfigError> {
        let mut checked = Values::new();
        for (name, value) in values {
            let text = match value.get_ref() {
                toml::Value::String(s) => s.clone(),
                toml::Value::Integer(n) => n.to_string(),
                toml::Value::Boolean(b) if is_switch(name) => u8::from(*b).to_string(),
                toml::Value::Boolean(b) => b.to_string(),
                other => {
                    let (name, found) = (name.clone(), other.type_str());
                    return Err(self.at(value, Mistake::TunableType { name, found }));
                }
            };
            checked_alone(name, &text, of).map_err(|mistake| self.at(value, mistake))?;
            // A number is stored in the unit of its tunable, as the daemon stores values that were set at run time.
            let text = number(name, &text)
                .map(|n| n.to_string())
                .or_else(|| present_word(name, &text))
                .unwrap_or(text);
            checked.insert(name.clone(), text);
        }
        Ok(checked)
    }

    /// Refuses values whose range depends on other values of the file, if they are out of it.
    pub(super) fn fit_together(&self, file: &File, config: &Config) -> Result<(), ConfigError> {
        let (preset, everywhere) = (&config.everywhere.preset, &config.everywhere.tunables);
        let limits = Limits::of(config);
        self.fit(&limits, [preset].into_iter(), &file.tunables, everywhere)?;
        let none = Values::new();
        for (id, section) in &file.set {
            let own = config.sets.get(&id.to_lowercase()).map_or(&none, |s| &s.tunables);
            self.fit(&limits, [preset, everywhere].into_iter(), &section.tunables, own)?;
        }
        for (id, section) in &file.volume {
            let Some(own) = config.volumes.get(&id.to_lowercase()) else { continue };
            let below = [preset, everywhere, &own.preset].into_iter();
            self.fit(&limits, below, &section.tunables, &own.tunables)?;
        }
        Ok(())
    }

    /// Refuses values of one section. `below`: values that hold where the section names none.
    fn fit<'v>(
        &self,
        limits: &Limits,
        below: impl Iterator<Item = &'v Values>,
        spans: &Spans,
        own: &Values,
    ) -> Result<(), ConfigError> {
        let (mut set, mut device) = (SetTunables::default(), DeviceTunables::default());
        device.set_cutoff_writeback(limits.cutoff_writeback);
        let below: Vec<(&str, &str)> = below.flatten().map(|(k, v)| (&**k, &**v)).collect();
        // They are checked where they are written.
        let of_sets = below.iter().filter(|(name, _)| owners(name).0).copied();
        let of_devices = below.iter().filter(|(name, _)| owners(name).1).copied();
        let _ = (set.set_all(of_sets), device.set_all(of_devices));
        let mut change = |name: &str, value: &str| -> Result<(), TunableError> {
            let (of_set, of_device) = owners(name);
            if of_set {
                set.check(name, value)?;
                set.set(name, value)?;
            }
            if of_device {
                device.check(name, value)?;
                device.set(name, value)?;
            }
            Ok(())
        };
        let mut left: Vec<(&String, &String)> = own.iter().collect();
        loop {
            let (before, mut refused) = (left.len(), Vec::new());
            for (name, value) in left {
                if let Err(e) = change(name, value) {
                    refused.push((name, value, e));
                }
            }
            let same = refused.len() == before;
            match refused.first().and_then(|(name, ..)| spans.get(*name)) {
                Some(place) if same => {
                    let (.., e) = refused.swap_remove(0);
                    return Err(self.at(place, Mistake::Tunable(e)));
                }
                Some(_) => left = refused.into_iter().map(|(name, value, _)| (name, value)).collect(),
                None => return Ok(()),
            }
        }
    }
}

/// Limits of volumes by tunables of sets. Which volume belongs to which set is not known here, so the widest hold.
struct Limits {
    cutoff_writeback: u8,
}

impl Limits {
    fn of(config: &Config) -> Limits {
        let sections = config.sets.values().chain([&config.everywhere]);
        let named = sections.filter_map(|s| s.tunables.get("cutoff_writeback")?.parse().ok());
        let default = SetTunables::default().cutoff_writeback;
        Limits { cutoff_writeback: named.chain([default]).max().unwrap_or(default) }
    }
}

/// Whether a tunable takes 0 and 1 alone.
fn is_switch(name: &str) -> bool {
    let takes = |value: &str| checked_alone(name, value, None).is_ok();
    takes("0") && takes("1") && !takes("2")
}

/// The present word for a value that an earlier version wrote; `None` if the value has no other word.
pub(crate) fn present_word(name: &str, value: &str) -> Option<String> {
    if name == "label" || number(name, value).is_some() {
        return None;
    }
    let (of_set, of_device) = owners(name);
    let (mut set, mut device) = (SetTunables::default(), DeviceTunables::default());
    let raw = match (of_set, of_device) {
        (true, _) => set.set(name, value).and_then(|_| set.raw(name)),
        (_, true) => device.set(name, value).and_then(|_| device.raw(name)),
        _ => return None,
    };
    raw.ok().filter(|raw| raw != value)
}

/// Refuses a value that no value of another tunable makes possible.
fn checked_alone(name: &str, value: &str, of: Option<Owner>) -> Result<(), Mistake> {
    if name == "label" {
        return Err(Mistake::Label);
    }
    let (of_set, of_device) = owners(name);
    let set = || SetTunables::check_alone(name, value);
    let device = || DeviceTunables::check_alone(name, value);
    let checked = match (of, of_set, of_device) {
        (_, false, false) => return Err(Mistake::NoTunable { name: name.to_owned() }),
        (Some(Owner::Set), false, _) => return Err(Mistake::OfVolumes { name: name.to_owned() }),
        (Some(Owner::Device), _, false) => return Err(Mistake::OfSets { name: name.to_owned() }),
        (None, true, true) => set().and_then(|()| device()),
        (Some(Owner::Set), true, _) | (None, true, false) => set(),
        (Some(Owner::Device), _, true) | (None, false, true) => device(),
    };
    checked.map_err(Mistake::Tunable)
}
