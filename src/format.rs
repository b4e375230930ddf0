//! How quantities are written for people: one spelling for the terminal, the tables and the plots. Pure.

const KIB: f64 = 1024.0;
const MIB: f64 = 1024.0 * KIB;
const GIB: f64 = 1024.0 * MIB;

/// A size in bytes as `1.50 GiB` or `12.34 MiB`. Below 10 KiB, where MiB would show nothing, as `512 B`.
pub fn bytes(bytes: u64) -> String {
    if bytes < 10 * KIB as u64 {
        return format!("{bytes} B");
    }
    let mebibytes = two_decimals(bytes as f64 / MIB);
    // What rounds to 1024.00 MiB is a GiB.
    if mebibytes < 1024.0 { format!("{mebibytes:.2} MiB") } else { format!("{:.2} GiB", bytes as f64 / GIB) }
}

/// A size against its limit in the limit's unit, as `1.50 / 16.00 GiB`.
pub fn bytes_of(used: u64, limit: u64) -> String {
    if limit < 10 * KIB as u64 {
        return format!("{used} / {limit} B");
    }
    let (unit, name) = if two_decimals(limit as f64 / MIB) < 1024.0 { (MIB, "MiB") } else { (GIB, "GiB") };
    format!("{:.2} / {:.2} {name}", used as f64 / unit, limit as f64 / unit)
}

/// A time in seconds as `m:ss`, rounded to whole seconds: `1:52`, `90:00`. Not a number and infinity are written as they are.
pub fn minutes(seconds: f64) -> String {
    if !seconds.is_finite() {
        return format!("{seconds}");
    }
    let sign = if seconds <= -0.5 { "-" } else { "" };
    let whole = seconds.abs().round() as u64;
    format!("{sign}{}:{:02}", whole / 60, whole % 60)
}

/// A count with thousands separators, as `1,234,567`.
pub fn count(count: u64) -> String {
    let digits = count.to_string();
    let mut written = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            written.push(',');
        }
        written.push(digit);
    }
    written
}

/// Throughput, as `12,345 tokens/s`; with one decimal below 100.
pub fn tokens_per_second(throughput: f64) -> String {
    if !throughput.is_finite() || throughput < 99.95 {
        return format!("{throughput:.1} tokens/s");
    }
    format!("{} tokens/s", count(throughput.round() as u64))
}

fn two_decimals(number: f64) -> f64 {
    (number * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::{bytes, bytes_of, count, minutes, tokens_per_second};

    #[test]
    fn bytes_are_mib_or_gib_with_two_decimals() {
        for (size, written) in [
            (0, "0 B"),
            (10_239, "10239 B"),
            (10_240, "0.01 MiB"),
            (1 << 20, "1.00 MiB"),
            (12_939_428, "12.34 MiB"),
            ((1 << 30) - 1, "1.00 GiB"),
            (3 << 29, "1.50 GiB"),
            (16 << 30, "16.00 GiB"),
            (u64::MAX, "17179869184.00 GiB"),
        ] {
            assert_eq!(bytes(size), written, "{size}");
        }
    }

    #[test]
    fn a_size_and_its_limit_share_the_limits_unit() {
        assert_eq!(bytes_of(3 << 29, 16 << 30), "1.50 / 16.00 GiB");
        assert_eq!(bytes_of(3 << 29, 64 << 20), "1536.00 / 64.00 MiB");
        assert_eq!(bytes_of(0, 100), "0 / 100 B");
    }

    #[test]
    fn seconds_become_minutes_and_two_digits_of_seconds() {
        for (seconds, written) in [
            (0.0, "0:00"),
            (0.5, "0:01"),
            (9.4, "0:09"),
            (59.6, "1:00"),
            (112.0, "1:52"),
            (5400.0, "90:00"),
            (-0.2, "0:00"),
            (-61.0, "-1:01"),
            (f64::NAN, "NaN"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(minutes(seconds), written, "{seconds}");
        }
    }

    #[test]
    fn counts_have_thousands_separators() {
        for (number, written) in [(0, "0"), (999, "999"), (1000, "1,000"), (123_456, "123,456"), (1_234_567, "1,234,567")] {
            assert_eq!(count(number), written);
        }
        assert_eq!(count(u64::MAX), "18,446,744,073,709,551,615");
    }

    #[test]
    fn throughput_keeps_a_decimal_only_where_it_matters() {
        for (throughput, written) in
            [(0.0, "0.0 tokens/s"), (12.34, "12.3 tokens/s"), (99.96, "100 tokens/s"), (12_345.4, "12,345 tokens/s"), (f64::NAN, "NaN tokens/s")]
        {
            assert_eq!(tokens_per_second(throughput), written);
        }
    }
}
