//! A hub on the loopback: answers listings and files as the real one does, and remembers what it was asked.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// What one request said.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// Path of its URL.
    pub(crate) path: String,
    /// Its `Authorization` header.
    pub(crate) authorization: Option<String>,
}

/// The server; it stops when dropped.
pub(crate) struct HubServer {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// A repository it serves, or the status it answers with.
#[derive(Clone)]
pub(crate) enum Answer {
    /// Path and contents of each file.
    Files(Vec<(String, Vec<u8>)>),
    /// An HTTP error.
    Status(u16),
}

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

impl HubServer {
    /// Serves repositories named `datasets/owner/name` and `models/owner/name`.
    pub(crate) fn start(repositories: Vec<(&str, Answer)>) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let repositories: HashMap<String, Answer> = repositories.into_iter().map(|(name, answer)| (name.to_owned(), answer)).collect();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let (requests, stop) = (Arc::clone(&requests), Arc::clone(&stop));
            move || {
                for stream in listener.incoming() {
                    if stop.load(Ordering::SeqCst) {
                        break;
                    }
                    let _ = answer(&repositories, stream.unwrap(), &requests);
                }
            }
        });
        Self { address, requests, stop, thread: Some(thread) }
    }

    /// For `HF_ENDPOINT`.
    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Everything it was asked so far.
    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

impl Drop for HubServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Wakes the thread from `accept`.
        let _ = TcpStream::connect(self.address);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn answer(repositories: &HashMap<String, Answer>, mut stream: TcpStream, requests: &Mutex<Vec<Request>>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        match line.trim_end().split_once(": ") {
            Some((name, value)) => headers.insert(name.to_ascii_lowercase(), value.to_owned()),
            None => break,
        };
    }
    requests.lock().unwrap().push(Request { path: path.clone(), authorization: headers.get("authorization").cloned() });
    let (repository, file) = match path.strip_prefix("/api/") {
        Some(listing) => (listing.split("/revision/").next().unwrap_or_default().to_owned(), None),
        None => {
            let (repository, file) = path.trim_start_matches('/').split_once("/resolve/main/").unwrap_or_default();
            let kind = if repository.starts_with("datasets/") { "" } else { "models/" };
            (format!("{kind}{repository}"), Some(file.to_owned()))
        }
    };
    let files = match repositories.get(&repository) {
        Some(Answer::Files(files)) => files,
        Some(Answer::Status(status)) => return respond(&mut stream, *status, &[], b""),
        None => return respond(&mut stream, 404, &[], b""),
    };
    let Some(file) = file else {
        let siblings: Vec<_> = files.iter().map(|(name, _)| serde_json::json!({"rfilename": name})).collect();
        let body = serde_json::json!({"sha": COMMIT, "siblings": siblings}).to_string();
        return respond(&mut stream, 200, &[], body.as_bytes());
    };
    let Some((name, contents)) = files.iter().find(|(name, _)| *name == file) else { return respond(&mut stream, 404, &[], b"") };
    let range = headers.get("range").and_then(|range| range.strip_prefix("bytes=")).and_then(|range| range.split_once('-'));
    let start = range.and_then(|(start, _)| start.parse().ok()).unwrap_or(0_usize).min(contents.len());
    let end = range.and_then(|(_, end)| end.parse().ok()).map_or(contents.len(), |end: usize| (end + 1).min(contents.len())).max(start);
    let etag = name.bytes().fold(17_u64, |hash, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte)));
    let extra = [
        ("ETag", format!("\"{etag:016x}\"")),
        ("X-Repo-Commit", COMMIT.to_owned()),
        ("Content-Range", format!("bytes {start}-{}/{}", end.saturating_sub(1), contents.len())),
    ];
    respond(&mut stream, 206, &extra, &contents[start..end])
}

fn respond(stream: &mut TcpStream, status: u16, headers: &[(&str, String)], body: &[u8]) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {status} -\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    stream.flush()
}
