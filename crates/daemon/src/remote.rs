//! The configuration of TCP with the contents of the files that it names: token and certificates.
//!
//! Owns the comparison of the token, and the decision whether a request is answered. Neither token nor key is ever part of
//! a message. Must not know how a client connects.

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::http::{HeaderMap, Method, Uri, header};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serve::Failure;
use subtle::ConstantTimeEq;
use tokio_rustls::TlsAcceptor;

use crate::config::{NamedFile, Tcp};

/// Permitted lengths of a token in bytes.
const TOKEN_BYTES: std::ops::RangeInclusive<usize> = 16..=512;

/// The TCP configuration with the contents of its files.
pub(crate) struct Remote {
    pub(crate) listen: Vec<SocketAddr>,
    token: Token,
    pub(crate) tls: Option<Tls>,
    metrics_without_token: bool,
}

/// The token. It has no `Debug`, so no message shows it.
struct Token(Vec<u8>);

pub(crate) struct Tls {
    pub(crate) acceptor: TlsAcceptor,
    /// The certificates, to compare two configurations.
    certificates: Vec<CertificateDer<'static>>,
}

/// The right of a request to be answered, by its token and path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Entry {
    /// The request has the token.
    Known,
    /// The request is for a file of the dashboard, which every client may read.
    Page,
    /// The request is for the metrics, and the configuration lets every client read them.
    Metrics,
    Missing,
    Wrong,
}

impl Remote {
    /// Reads the files that the configuration names.
    ///
    /// # Errors
    /// If a file cannot be used, or other users can read it; the message names line and file, and has nothing of its
    /// contents.
    pub(crate) fn load(tcp: &Tcp) -> Result<Remote, Failure> {
        let token = Token::read(&tcp.token_file)?;
        let tls = tcp.tls.as_ref().map(|(certificate, key)| Tls::read(certificate, key)).transpose()?;
        let metrics_without_token = tcp.metrics_without_token;
        Ok(Remote { listen: tcp.listen.clone(), token, tls, metrics_without_token })
    }

    /// The differences from an older configuration, as text.
    pub(crate) fn differences(old: Option<&Remote>, new: Option<&Remote>) -> Vec<String> {
        let (old, new) = match (old, new) {
            (None, None) => return Vec::new(),
            (Some(_), None) => return vec!["listen: the daemon no longer listens on TCP".into()],
            (None, Some(new)) => return vec![format!("listen: {}", new.in_words())],
            (Some(old), Some(new)) => (old, new),
        };
        let mut said = Vec::new();
        if old.listen != new.listen || old.tls.is_some() != new.tls.is_some() {
            said.push(format!("listen: {}", new.in_words()));
        }
        if old.token.0 != new.token.0 {
            said.push("token_file: the token has changed; the old one is refused from now on".into());
        }
        let certificates = |r: &Remote| r.tls.as_ref().map(|t| t.certificates.clone());
        if old.tls.is_some() && new.tls.is_some() && certificates(old) != certificates(new) {
            said.push("tls_certificate: the certificate has changed".into());
        }
        if old.metrics_without_token != new.metrics_without_token {
            said.push(format!("metrics_without_token: {}", new.metrics_without_token));
        }
        said
    }

    fn in_words(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let all: Vec<_> = self.listen.iter().map(|a| format!("{scheme}://{a}")).collect();
        all.join(", ")
    }

    pub(crate) fn entry(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Entry {
        let mut shown = headers.get_all(header::AUTHORIZATION).iter();
        let first = shown.next();
        // With two headers it is not defined which one applies.
        let only = first.filter(|_| shown.next().is_none());
        if only.and_then(|value| bearer(value.as_bytes())).is_some_and(|token| self.token.is(token)) {
            return Entry::Known;
        }
        let path = uri.path();
        let probes = *method == Method::GET || *method == Method::HEAD;
        if probes && (path == "/" || path.starts_with("/assets/")) {
            return Entry::Page;
        }
        if probes && path == "/metrics" && self.metrics_without_token {
            return Entry::Metrics;
        }
        if first.is_some() { Entry::Wrong } else { Entry::Missing }
    }
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

impl Token {
    fn read(file: &NamedFile) -> Result<Token, Failure> {
        let bytes = secret("token_file", file)?;
        let token = bytes.trim_ascii();
        let wanted = TOKEN_BYTES.contains(&token.len()) && token.iter().all(u8::is_ascii_graphic);
        if !wanted {
            return Err(in_line("token_file", file, RemoteError::NoToken));
        }
        Ok(Token(token.to_vec()))
    }

    /// Compares in a time that does not depend on the number of equal bytes.
    fn is(&self, shown: &[u8]) -> bool {
        self.0.ct_eq(shown).into()
    }
}

impl Tls {
    fn read(certificate: &NamedFile, key: &NamedFile) -> Result<Tls, Failure> {
        let of_certificate = |e: RemoteError| in_line("tls_certificate", certificate, e);
        let pem = serve::secret::read_public(&certificate.path);
        let pem = pem.map_err(|e| in_line("tls_certificate", certificate, e))?;
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        let certificates = chain.map_err(|e| of_certificate(RemoteError::NotCertificates(e)))?;
        if certificates.is_empty() {
            return Err(of_certificate(RemoteError::NoCertificates));
        }
        let no_key = |_| in_line("tls_key", key, RemoteError::NoKey);
        let private = PrivateKeyDer::from_pem_slice(&secret("tls_key", key)?).map_err(no_key)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(Failure::of)?
            .with_no_client_auth()
            .with_single_cert(certificates.clone(), private);
        let mut config = config.map_err(|e| in_line("tls_key", key, RemoteError::OtherCertificate(e)))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Tls { acceptor: TlsAcceptor::from(Arc::new(config)), certificates })
    }
}

/// The reason why the contents of a file for TCP cannot be used. No message contains a part of a token or key.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RemoteError {
    #[error(
        "expected one line of {} to {} visible ASCII characters, such as `openssl rand -hex 32` makes",
        TOKEN_BYTES.start(),
        TOKEN_BYTES.end()
    )]
    NoToken,
    #[error("expected certificates in PEM form: {0}")]
    NotCertificates(#[source] rustls::pki_types::pem::Error),
    #[error("expected certificates in PEM form, found none")]
    NoCertificates,
    /// The cause is left out, because it could quote the key.
    #[error("expected a private key in PEM form")]
    NoKey,
    #[error("does not fit tls_certificate: {0}")]
    OtherCertificate(#[source] rustls::Error),
}

/// The failure of the file that a line of the configuration names.
pub(crate) fn in_line(key: &str, file: &NamedFile, e: impl Error + Send + Sync + 'static) -> Failure {
    Failure::because(format_args!("line {}: {key}: {}", file.line, file.path.display()), e)
}

/// The contents of a secret file.
fn secret(key: &str, file: &NamedFile) -> Result<Vec<u8>, Failure> {
    serve::secret::read_private(&file.path).map_err(|e| in_line(key, file, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const TOKEN: &str = "0123456789abcdef";

    fn remote(metrics_without_token: bool) -> Remote {
        Remote { listen: Vec::new(), token: Token(TOKEN.into()), tls: None, metrics_without_token }
    }

    fn entry(remote: &Remote, method: Method, path: &str, shown: &[&str]) -> Entry {
        let mut headers = HeaderMap::new();
        for value in shown {
            headers.append(header::AUTHORIZATION, value.parse().unwrap());
        }
        remote.entry(&method, &path.parse().unwrap(), &headers)
    }

    #[test]
    fn only_the_right_token_is_accepted() {
        let right = format!("Bearer {TOKEN}");
        let remote = remote(false);
        for (shown, wanted) in [
            (&[&*right][..], Entry::Known),
            (&["bearer   0123456789abcdef "], Entry::Known),
            (&[], Entry::Missing),
            (&[""], Entry::Wrong),
            (&["Bearer"], Entry::Wrong),
            (&["Bearer "], Entry::Wrong),
            (&["Bearer 0123456789abcde"], Entry::Wrong),
            (&["Bearer 0123456789abcdef0"], Entry::Wrong),
            (&["Bearer 0123456789abcdeg"], Entry::Wrong),
            (&["Basic 0123456789abcdef"], Entry::Wrong),
            (&[TOKEN], Entry::Wrong),
            (&[&*right, &*right], Entry::Wrong),
            (&["Bearer nothing at all", &*right], Entry::Wrong),
        ] {
            assert_eq!(entry(&remote, Method::GET, "/v1/status", shown), wanted, "{shown:?}");
        }
    }

    #[test]
    fn pages_need_no_token() {
        for (method, path, metrics, wanted) in [
            (Method::GET, "/", false, Entry::Page),
            (Method::HEAD, "/assets/chart.js", false, Entry::Page),
            (Method::POST, "/assets/chart.js", false, Entry::Missing),
            (Method::GET, "/assets", false, Entry::Missing),
            (Method::GET, "//v1/status", false, Entry::Missing),
            (Method::GET, "/v1/openapi.json", false, Entry::Missing),
            (Method::GET, "http://x/v1/status", false, Entry::Missing),
            (Method::GET, "/nowhere", false, Entry::Missing),
            (Method::GET, "/metrics", false, Entry::Missing),
            (Method::GET, "/metrics", true, Entry::Metrics),
            (Method::GET, "/metrics/", true, Entry::Missing),
        ] {
            assert_eq!(entry(&remote(metrics), method, path, &[]), wanted, "{path}");
        }
        assert_eq!(entry(&remote(false), Method::GET, "/", &["Bearer wrong"]), Entry::Page);
    }

    #[test]
    fn files_of_secrets_that_all_users_can_read_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str, mode: u32| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            NamedFile { path, line: 7 }
        };
        let refused = |named: &NamedFile| Token::read(named).err().unwrap().message().unwrap().to_owned();
        assert!(Token::read(&file("good", &format!("{TOKEN}\n"), 0o640)).unwrap().is(TOKEN.as_bytes()));
        for mode in [0o604, 0o602, 0o644] {
            let said = refused(&file("open", TOKEN, mode));
            assert!(
                said.starts_with("line 7: token_file: ") && said.contains("can be read by every user"),
                "{said}"
            );
        }
        for text in ["short", "", "0123456789abcde fg", "0123456789abcdef\n0123456789abcdef", "ééééééééééé"]
        {
            let said = refused(&file("strange", text, 0o600));
            assert!(said.contains("visible ASCII"), "{said}");
            assert!(text.is_empty() || !said.contains(text), "{said}");
        }
        assert!(refused(&NamedFile { path: dir.path().into(), line: 7 }).contains("expected a file"));
        let none = NamedFile { path: dir.path().join("none"), line: 7 };
        assert!(refused(&none).contains("cannot be opened"));
        let text = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n";
        let said = Tls::read(&file("certificate", text, 0o644), &file("key", text, 0o600)).err().unwrap();
        assert!(said.message().unwrap().contains("found none"), "{said:?}");
    }
}
