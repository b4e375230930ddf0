//! Entry point of the `sweep` binary: parse, choose a command, turn an error into text and exit code.

use std::process::ExitCode;

use clap::Parser;
use sweep::cli::{Cli, Command};
use sweep::{commands, ui};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let ended = match cli.command {
        Command::Run(arguments) => commands::run::run(&arguments),
        Command::Plan(arguments) => commands::plan::plan(&arguments),
        Command::Report(arguments) => commands::report::report(&arguments),
        Command::Status(arguments) => commands::status::status(&arguments),
        Command::Compare(arguments) => commands::compare::compare(&arguments),
        Command::Devices(arguments) => commands::devices::devices(&arguments),
        Command::Supervise => commands::supervise::supervise(),
        Command::Trial(arguments) => return commands::trial::trial(&arguments),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            ui::render_error(&error);
            error.exit_code()
        }
    }
}
