//! Manual pages: one of section 8 for each command, and `ubcache.toml` of section 5.
//!
//! Owns the layout. Arguments come from the definition of the command line, keys from the parser of the configuration, and
//! examples from module `examples`.

use std::io::{Error, Result};
use std::path::Path;

use clap::Command;
use clap_mangen::Man;

use crate::examples::{self, PAGES, Page};

/// The section of commands for administration.
const SECTION: &str = "8";
/// The manual that the pages belong to.
const MANUAL: &str = "bcache in userspace";
/// No hyphens in names, and no lines that are stretched.
const PLAIN: &str = ".nh\n.ad l\n";
/// Where the package puts the guide.
const GUIDE: &str = "/usr/share/doc/ubcache/guide";

/// Writes every page into a directory.
///
/// # Errors
/// If a command has no examples, or a file cannot be written.
pub(crate) fn write(dir: &Path, command: &Command) -> Result<()> {
    let mut command = command.clone().disable_help_subcommand(true);
    command.build();
    write_command(dir, &command)?;
    std::fs::write(dir.join("ubcache.toml.5"), configuration())
}

fn write_command(dir: &Path, command: &Command) -> Result<()> {
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        write_command(dir, sub)?;
    }
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    let page = PAGES.iter().find(|page| page.name == name);
    let page = page.ok_or_else(|| Error::other(format!("{name}: has no examples (src/examples.rs)")))?;
    std::fs::write(dir.join(format!("{name}.{SECTION}")), render(command, page)?)
}

fn render(command: &Command, page: &Page) -> Result<Vec<u8>> {
    let version = env!("CARGO_PKG_VERSION");
    let man = Man::new(command.clone()).section(SECTION).manual(MANUAL).source(format!("ubcache {version}"));
    let mut out = Vec::new();
    man.render_title(&mut out)?;
    out.extend(PLAIN.as_bytes());
    man.render_name_section(&mut out)?;
    man.render_synopsis_section(&mut out)?;
    man.render_description_section(&mut out)?;
    if command.get_arguments().any(|arg| !arg.is_hide_set()) {
        man.render_options_section(&mut out)?;
    }
    if command.get_subcommands().any(|sub| !sub.is_hide_set()) {
        man.render_subcommands_section(&mut out)?;
    }
    out.extend(exit_status().into_bytes());
    out.extend(sections(page.examples, page.files, page.see).into_bytes());
    Ok(out)
}

/// The exit codes, as the program has them.
fn exit_status() -> String {
    let mut out = ".SH \"EXIT STATUS\"\n".to_owned();
    for (code, meaning) in cli::EXIT_CODES {
        out += &tagged(&code.to_string(), meaning);
    }
    out
}

/// The sections EXAMPLES, FILES and SEE ALSO.
fn sections(examples: &[(&str, &str)], files: &[(&str, &str)], see: &[&str]) -> String {
    let mut out = ".SH EXAMPLES\n".to_owned();
    for (about, command) in examples {
        out += &format!("{}\n.PP\n.RS 4\n.nf\n", text(about));
        for line in command.lines() {
            // An empty line would end the paragraph.
            out += &if line.is_empty() { "\\&\n".to_owned() } else { format!("\\fB{}\\fR\n", text(line)) };
        }
        out += ".fi\n.RE\n.PP\n";
    }
    out += ".SH FILES\n";
    for (path, meaning) in files {
        out += &tagged(path, meaning);
    }
    out += &tagged(
        GUIDE,
        "The guide for operators. index.md there is its first page, day2/index.md finds a page by the message.",
    );
    out += ".SH \"SEE ALSO\"\n";
    let (pages, guide): (Vec<&str>, Vec<&str>) = see.iter().copied().partition(|entry| entry.contains('('));
    let pages: Vec<String> = pages
        .iter()
        .filter_map(|entry| entry.split_once('('))
        .map(|(name, section)| format!("\\fB{}\\fR({section}", text(name)))
        .collect();
    out += &pages.join(",\n");
    out += "\n.PP\n";
    for entry in guide {
        out += &format!("{}\n.br\n", text(&format!("{GUIDE}/{entry}")));
    }
    out
}

/// The page of the configuration file.
fn configuration() -> String {
    let version = env!("CARGO_PKG_VERSION");
    let mut out = format!(".TH ubcache.toml 5 \"\" \"ubcache {version}\" \"{MANUAL}\"\n{PLAIN}.SH NAME\n");
    out += &text("ubcache.toml - configuration of the ubcache daemon");
    out += "\n.SH SYNOPSIS\n.I /etc/ubcache/ubcache.toml\n.SH DESCRIPTION\n";
    for paragraph in examples::CONFIGURATION {
        out += &format!("{}\n.PP\n", text(paragraph));
    }
    for (section, title) in [
        ("", "KEYS"),
        ("set.ID", "KEYS OF A SECTION [set.ID]"),
        ("volume.ID", "KEYS OF A SECTION [volume.ID]"),
    ] {
        out += &format!(".SH \"{title}\"\n");
        for key in cli::CONFIG_KEYS.iter().filter(|key| key.section == section) {
            let default =
                if key.default.is_empty() { String::new() } else { format!(" Default: {}.", key.default) };
            out += &tagged(key.name, &format!("{} Value: {}.{default}", key.meaning, key.values));
        }
    }
    out + &sections(examples::CONFIGURATION_EXAMPLES, examples::DAEMON, examples::CONFIGURATION_SEE)
}

/// A paragraph with a tag.
fn tagged(tag: &str, meaning: &str) -> String {
    format!(".TP\n\\fB{}\\fR\n{}\n", text(tag), text(meaning))
}

/// Text in which roff sees no command of its own.
fn text(text: &str) -> String {
    let escaped = text.replace('\\', "\\e").replace('-', "\\-");
    if escaped.starts_with(['.', '\'']) { format!("\\&{escaped}") } else { escaped }
}
