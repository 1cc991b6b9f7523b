"""Write docs/hard-use.md: what goes wrong for users, what they see then, and the test that holds it; ``--check`` compares.

    python docs/make_hard_use.py [--check]

The cases are listed here by hand. That every named test exists, how it is marked, and which cases no test holds is read from the
tests' source, without importing it. A name that is not there ends the script with an error.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MARKS = ("slow", "real_model", "browser", "hard")


class Part(NamedTuple):
    """One situation: what happens, what the user sees, and the tests (``module::name`` without ``test_``)."""

    what: str
    seen: str
    tests: tuple[str, ...] = ()


CASES: dict[str, tuple[Part, ...]] = {
    "A process is killed": (
        Part(
            "native code aborts in the middle of a notebook",
            "that notebook fails with its cell, the signal and the last native lines, although the saved copy claims success",
            ("report_notebooks::native_death_is_a_failure_although_the_saved_notebook_says_completed",),
        ),
        Part(
            "the runner of a notebook is killed",
            "that notebook fails; never taken for complete",
            ("report_notebooks::the_runner_itself_being_killed_is_a_failure",),
        ),
        Part(
            "one notebook fails",
            "the others run, the index says which one failed",
            ("report_notebooks::a_failing_cell_fails_its_notebook_alone_and_the_index_says_so",),
        ),
        Part(
            "a measuring child aborts or is killed",
            "one error with the assert's text or the signal; the next child works",
            (
                "worker::a_native_abort_is_an_error_with_the_assert_text_and_the_next_child_works",
                "worker::a_killed_child_is_named_with_its_signal",
            ),
        ),
        Part("the parent is killed", "its child ends with it", ("worker::the_child_dies_with_its_parent",)),
        Part(
            "a report is killed",
            "no runner and no kernel stays; the older report is whole, or comes back; what was half made is cleared up",
            (
                "hard_report::a_report_that_is_killed_leaves_no_runner_and_no_kernel_behind",
                "hard_report::a_killed_report_loses_no_older_one_and_is_cleared_up",
            ),
        ),
        Part(
            "a measurement crashes in the middle of a profile",
            "named, with the last native lines; the others are measured, and the next run tries only that one",
            ("hard_measure::a_crash_in_one_measurement_leaves_the_others_and_only_it_is_tried_again",),
        ),
        Part(
            "random kills of a whole quick run, fifty times",
            "the results of an uninterrupted run",
            ("hard::fifty_kills_of_parent_or_child_leave_the_results_of_a_quiet_run",),
        ),
    ),
    "Ctrl-C": (
        Part(
            "while notebooks run",
            "no kernel is left behind",
            ("report_notebooks::an_interrupted_report_leaves_no_kernel_behind",),
        ),
        Part(
            "while a report is written",
            "the old report stays whole",
            ("report::a_report_that_breaks_leaves_the_old_one_whole",),
        ),
        Part(
            "while measuring, or asked to end by SIGTERM",
            "stops within 5 s, says how many results are stored and where; no child stays; the next run resumes",
            (
                "hard_runs::ctrl_c_says_what_was_kept_leaves_no_child_and_the_next_run_goes_on",
                "hard_runs::a_run_that_is_asked_to_end_does_what_it_does_after_ctrl_c",
            ),
        ),
    ),
    "Odd notebooks": (
        Part(
            "saved with another kernel's name",
            "runs all the same",
            ("report_notebooks::another_kernel_name_in_the_notebook_does_not_matter",),
        ),
        Part(
            "no parameters tag, an unknown parameter, one of another type",
            "refused in one line, the known parameters named",
            (
                "report_notebooks::a_notebook_without_the_parameters_tag_is_refused",
                "report_notebooks::an_unknown_parameter_is_refused_and_the_known_ones_named",
                "report_notebooks::a_parameter_of_another_type_is_refused",
            ),
        ),
        Part(
            "a parameter that looks like a number",
            "arrives as the string it is",
            ("report_notebooks::a_string_parameter_arrives_as_that_string",),
        ),
        Part(
            "a file that is no notebook",
            "named; the others run",
            ("report_notebooks::a_file_that_is_no_notebook_is_named_and_the_others_run",),
        ),
    ),
    "Odd places": (
        Part(
            "build.sh from anywhere, through a link, no HOME, any locale",
            "it builds",
            ("native::it_starts_from_anywhere_through_a_link_without_a_home_in_any_locale",),
        ),
        Part(
            "folders named a{b}c, with space, ünï",
            "everything works",
            (
                "report::any_folder_name_will_do",
                "report_notebooks::a_folder_with_an_odd_name_will_do",
                "models::folder_names_with_spaces_braces_and_other_letters_work",
                "native::both_builds_come_out_of_any_folder",
            ),
        ),
        Part(
            "notebooks without HOME",
            "they run",
            ("report_notebooks::without_a_home_folder_notebooks_still_run",),
        ),
        Part(
            "a home that cannot be written, or is a file",
            "one line that names it",
            (
                "native::a_home_that_cannot_be_written_is_one_line",
                "native::a_home_without_write_permission_is_one_line",
                "models::a_home_that_is_a_file_is_one_line",
                "doctor::a_home_that_cannot_be_made_is_told",
            ),
        ),
        Part(
            "a run in a clone named a{b}c/with space/ünï, through a link, from /, no HOME, LC_ALL=C, PYTHONUTF8=0",
            "the results of any other run",
            ("hard_runs::a_clone_with_an_odd_name_behind_a_link_without_a_home_in_the_c_locale",),
        ),
        Part(
            "no terminal",
            "a plain log under 200 lines, without carriage returns",
            (
                "hard_runs::closed_input_no_terminal_and_settings_of_other_programs_change_nothing",
                "hard_terminal::a_log_of_hours_has_less_than_200_lines_and_no_carriage_return",
            ),
        ),
        Part(
            "standard input closed; llama.cpp's and OpenMP's variables set for something else",
            "the results of any other run",
            ("hard_runs::closed_input_no_terminal_and_settings_of_other_programs_change_nothing",),
        ),
        Part(
            "the repository and HOME read-only, HIRAISHIN_HOME elsewhere",
            "the results of any other run",
            ("hard_runs::a_read_only_repository_and_home_folder_with_the_results_elsewhere",),
        ),
    ),
    "Results": (
        Part(
            "a file truncated, changed, renamed, of another schema",
            "counts as absent and is named; never believed",
            (
                "results::a_damaged_unit_counts_as_absent_and_is_named",
                "results::a_renamed_manifest_is_not_believed",
            ),
        ),
        Part(
            "two runs write one unit",
            "one of the two, whole",
            ("results::two_writers_of_one_unit_leave_one_of_the_two_whole",),
        ),
        Part(
            "a folder that cannot be written, a file in the way",
            "one line",
            (
                "hard_store::results_on_a_read_only_disk_are_read_and_a_new_one_is_one_clear_line",
                "results::a_folder_that_cannot_be_written_is_one_clear_line",
                "results::a_file_in_the_way_is_one_clear_line",
            ),
        ),
        Part(
            "a receipt changed, cut, or naming files outside its folder",
            "refused",
            (
                "results::a_receipt_with_a_changed_byte_or_a_missing_file_is_refused",
                "results::a_receipt_cannot_name_files_outside_its_folder",
                "report::a_damaged_receipt_is_named_and_the_rest_is_built",
            ),
        ),
        Part("any plain value", "comes back from the store", ("results::any_plain_value_survives_the_store",)),
        Part(
            "the disk full while a result is written",
            "one line; what was stored is kept, nothing is half-written, and with room again the same command goes on",
            ("hard_runs::a_disk_that_fills_up_is_one_line_and_what_was_stored_is_kept",),
        ),
        Part(
            "results damaged, or of an older schema, when a profile runs",
            "named and measured again; the others stay as they are",
            ("hard_measure::damaged_results_and_those_of_an_older_schema_are_named_and_measured_again",),
        ),
        Part(
            "a writer killed in the middle",
            "a missing result, never a wrong one; its temporary file is removed later",
            ("hard_store::a_writer_killed_in_the_middle_leaves_a_missing_unit_and_its_file_is_swept_up",),
        ),
        Part(
            "a receipt made to do harm: links, numbers that are none, any bytes, any value anywhere",
            "read or refused in one line; no file of this machine is taken",
            (
                "hard_store::a_receipt_with_a_link_takes_no_file_of_this_machine",
                "hard_store::a_number_that_is_none_in_a_receipt_is_refused",
                "hard_store::any_mutation_of_a_receipt_is_read_or_refused",
                "hard_store::any_value_anywhere_in_a_receipt_is_read_or_refused",
            ),
        ),
    ),
    "Many at once": (
        Part(
            "notebooks side by side",
            "no clash of ports",
            ("report_notebooks::notebooks_side_by_side_never_fight_over_ports",),
        ),
        Part(
            "eight notebooks at once, ten times over",
            "all run",
            ("hard_report::eight_notebooks_at_once_ten_times_over_all_run",),
        ),
        Part("two builds at once", "one builds, the other takes it", ("native::two_calls_at_once_build_once",)),
        Part(
            "two runs at once",
            "both end well, and the results are those of one",
            ("hard_runs::two_runs_at_once_share_one_results_folder",),
        ),
        Part(
            "two reports at once",
            "the notebooks run once; one report is left, whole",
            (
                "hard_report::the_notebooks_of_two_reports_at_once_run_once",
                "hard_report::reports_at_once_leave_one_of_them_whole",
            ),
        ),
    ),
    "What reruns": (
        Part(
            "prose and layout edited",
            "nothing is measured again",
            ("provenance::prose_comments_and_layout_rerun_nothing",),
        ),
        Part(
            "a function or a number edited",
            "what imports it",
            (
                "provenance::a_changed_function_reruns_what_imports_it",
                "provenance::a_changed_number_reruns_its_own_module",
            ),
        ),
        Part(
            "a patch edited",
            "what it touches is compiled again; another backend's patch changes nothing",
            (
                "native::an_edited_patch_recompiles_only_what_it_touches",
                "native::a_patch_of_another_backend_leaves_the_build_as_it_is",
                "builds::what_decides_the_bits_changes_the_fingerprint",
            ),
        ),
        Part(
            "a prompt edited",
            "what was measured with it; the order of the prompts changes nothing",
            ("hard_measure::an_edited_prompt_is_measured_again_and_the_others_are_not",),
        ),
        Part("a notebook edited", "that one runs again", ("report_notebooks::only_what_changed_runs_again",)),
    ),
    "Building": (
        Part(
            "a tool missing, old, or unable to start",
            "named, with the package that brings it",
            (
                "native::a_missing_tool_is_named_with_its_package",
                "native::a_shim_that_cannot_start_counts_as_missing",
                "native::an_old_tool_gives_way_to_a_newer_one_further_down",
                "native::cmake_and_ninja_come_from_the_environment_when_the_machine_has_none",
            ),
        ),
        Part(
            "a compiler that is too old, does not start, or refuses the source",
            "refused; errors with file, line and log",
            (
                "native::a_compiler_that_is_too_old_is_refused",
                "native::a_compiler_that_does_not_start_is_refused",
                "native::a_compiler_error_shows_the_file_the_line_and_the_log",
            ),
        ),
        Part(
            "nvcc refuses the host compiler",
            "explained, with what mends it",
            ("native::an_nvcc_that_refuses_the_host_compiler_is_explained",),
        ),
        Part(
            "a source that is cut, damaged, or another one",
            "fetched again or refused",
            (
                "native::a_damaged_download_is_fetched_again",
                "native::an_archive_cut_short_or_damaged_is_refused",
                "native::sources_that_are_none_are_refused",
                "native::an_archive_cannot_write_outside_its_folder",
            ),
        ),
        Part(
            "a patch that does not apply; a copy left half patched",
            "named, nothing changes; put right",
            (
                "native::a_patch_that_does_not_apply_is_named_and_nothing_changes",
                "native::a_working_copy_left_half_patched_is_put_right",
            ),
        ),
        Part(
            "killed at any moment",
            "the next call ends right",
            (
                "native::kill_9_at_any_moment_and_the_next_call_ends_right",
                "native::a_kill_while_the_new_build_takes_its_place_loses_nothing",
                "native::what_killed_calls_left_behind_is_swept_up_later",
            ),
        ),
    ),
    "A library of one's own": (
        Part(
            "a relative path, a trailing slash, a space",
            "fine",
            ("builds::relative_paths_trailing_slashes_and_spaces_are_fine",),
        ),
        Part(
            "a file, an empty folder, a missing library, symbol or dependency, a crash on loading",
            "refused in one line, in a process of its own",
            (
                "builds::a_folder_that_is_none_is_refused",
                "builds::a_folder_without_one_of_the_libraries_is_refused",
                "builds::a_library_that_lacks_a_function_is_refused",
                "builds::a_library_without_what_it_depends_on_is_refused",
                "builds::a_file_that_is_no_library_is_refused",
                "builds::a_library_that_crashes_when_loaded_is_refused",
            ),
        ),
        Part(
            "a library that was changed or replaced after its build",
            "refused before anything is measured with it",
            ("hard_measure::a_library_that_is_not_the_one_described_is_refused",),
        ),
        Part(
            "structs laid out otherwise than the binding thinks",
            "refused before anything runs",
            (
                "worker::a_layout_with_one_offset_changed_is_refused",
                "worker::a_layout_with_one_size_changed_is_refused",
                "audit::a_field_more_in_a_struct_shows_in_the_default_values",
            ),
        ),
    ),
    "Model files": (
        Part(
            "empty, an error page, a Git-LFS pointer, big-endian",
            "called by its name and refused",
            ("gguf_header::what_is_no_gguf_is_called_by_its_name",),
        ),
        Part(
            "cut in the header, cut at half",
            "refused, with both sizes",
            (
                "gguf_header::a_file_cut_in_the_header_is_refused",
                "gguf_header::a_file_cut_at_half_is_refused_with_both_sizes",
            ),
        ),
        Part(
            "unknown architecture, vocabulary only, embeddings, a draft head, a projector",
            "refused",
            (
                "gguf_header::an_unknown_architecture_is_refused",
                "gguf_header::a_vocabulary_without_weights_is_refused",
                "gguf_header::an_embedding_model_is_refused",
                "gguf_header::a_draft_head_and_an_image_projector_are_refused",
            ),
        ),
        Part(
            "several parts",
            "accepted through the first; missing or cut parts named",
            (
                "gguf_header::all_parts_together_are_accepted_through_the_first",
                "gguf_header::one_part_of_several_names_the_missing_ones",
                "gguf_header::a_part_that_was_cut_is_found_from_the_first",
            ),
        ),
        Part(
            "any mutation of a header, any bytes",
            "parsed or refused, never a crash",
            (
                "gguf_header::any_mutation_of_a_header_parses_or_is_refused",
                "gguf_header::any_bytes_behind_a_valid_start_parse_or_are_refused",
            ),
        ),
        Part(
            "a model without roll-back (recurrent)",
            "refused by name before it decodes",
            (
                "speculative::models_that_cannot_roll_back_are_refused_by_name",
                "evaluate_native::a_recurrent_model_is_refused_by_name_before_it_decodes",
            ),
        ),
        Part(
            "no chat template",
            "prompts go in as they are, and the run says so",
            (
                "hard_templates::a_model_without_a_template_gets_the_bare_text",
                "hard_templates::a_model_without_a_template_is_mentioned",
            ),
        ),
    ),
    "Memory": (
        Part(
            "a long context with a large vocabulary; a limit on the process or its group",
            "refused before loading, with the number",
            (
                "models::a_long_context_with_a_large_vocabulary_is_refused_with_the_number",
                "hard_measure::a_model_that_does_not_fit_in_memory_is_refused_with_the_numbers_before_it_is_loaded",
                "models::a_limit_on_address_space_counts",
                "models::a_control_group_above_this_one_counts",
            ),
        ),
        Part(
            "a model larger than the GPU's memory",
            "refused by name",
            ("models::a_model_too_large_for_the_gpu_is_refused_by_name",),
        ),
    ),
    "Downloads": (
        Part(
            "interrupted",
            "kept and resumed; short interruptions are bridged",
            (
                "hub::an_interrupted_download_is_kept_and_resumed",
                "hub::short_interruptions_are_bridged_without_a_word",
                "hub::a_part_of_another_version_is_never_continued",
            ),
        ),
        Part(
            "a wrong checksum",
            "refused and removed",
            (
                "hub::a_wrong_checksum_is_refused_and_the_file_removed",
                "hub::a_damaged_part_is_refused_by_the_checksum_and_the_next_try_starts_over",
            ),
        ),
        Part(
            "401, 403, 404, 429, 500, no server",
            "one line each",
            ("hub::every_refusal_of_the_hub_is_one_line", "hub::no_server_at_all_is_one_line"),
        ),
        Part("too little disk", "told before the download", ("hub::a_full_disk_is_told_before_the_download",)),
    ),
    "The report in a browser": (
        Part(
            "no network, no JavaScript, print, zoomed, narrow",
            "complete and readable",
            (
                "report_browser::no_page_asks_for_anything_outside_or_complains",
                "report_browser::it_reads_the_same_without_javascript",
                "report_browser::dark_readers_get_the_dark_figures_and_print_gets_light_ones",
                "report_browser::zoomed_to_twice_the_size_the_text_still_fits",
                "report_browser::nothing_sticks_out_sideways",
            ),
        ),
        Part(
            "hostile text in prompts, output, pictures",
            "shown, never run",
            (
                "report_browser::hostile_text_is_shown_and_never_run",
                "report_notebooks::printed_text_is_escaped_isolated_and_cut",
                "report_notebooks::html_passes_an_allow_list",
                "report_notebooks::a_picture_that_could_act_is_not_shown",
                "report::the_fork_is_shown_with_both_continuations_and_hostile_text_escaped",
            ),
        ),
        Part(
            "a hostile chat template in a model",
            "nothing is run; one line, without what a terminal would act on; one that never ends is stopped",
            (
                "hard_templates::a_hostile_template_runs_nothing_and_is_one_line",
                "hard_templates::a_template_without_an_end_is_stopped",
                "hard_terminal::what_goes_wrong_is_one_line_and_a_status_that_is_no_verdict",
            ),
        ),
    ),
    "The command line": (
        Part(
            "what is missing on this machine",
            "`hiraishin doctor` names it and what mends it",
            (
                "doctor::a_fresh_clone_is_told_how_to_get_builds_and_model",
                "doctor::a_missing_tool_is_named_with_its_package",
            ),
        ),
        Part(
            "a mistake in a profile or a prompt file; any bytes in their place",
            "named with place or line",
            (
                "profile::a_mistake_in_a_profile_is_named_with_its_place",
                "profile::a_mistake_in_a_prompt_file_is_named_with_its_line",
                "profile::any_text_as_a_profile_gives_a_profile_or_one_clear_line",
                "profile::any_bytes_as_a_prompt_file_give_prompts_or_one_clear_line",
            ),
        ),
        Part(
            "`--help` of every verb",
            "at once, nothing heavy imported",
            ("hard_terminal::every_help_comes_without_importing_anything_heavy",),
        ),
        Part(
            "`--version`; without git, or inside somebody else's repository",
            "the commit and the versions that matter; no commit rather than another's",
            (
                "hard_terminal::the_version_names_the_commit_and_the_packages_that_matter",
                "hard_terminal::without_git_or_in_somebody_elses_repository_there_is_no_commit",
            ),
        ),
        Part(
            "an error, a signal, a bug here",
            "one line (a bug: its traceback) and a status that is never taken for a verdict",
            (
                "hard_terminal::what_goes_wrong_is_one_line_and_a_status_that_is_no_verdict",
                "hard_terminal::a_bug_shows_its_traceback_and_is_no_verdict",
                "hard_terminal::a_reader_that_goes_away_is_no_error_message_and_no_verdict",
                "hard_terminal::output_to_a_full_disk_is_one_line_and_no_verdict",
            ),
        ),
        Part(
            "a place that cannot be written; a build that is missing",
            "told before anything is measured or fetched",
            (
                "hard_terminal::a_place_that_cannot_be_written_is_refused_before_anything_is_measured",
                "hard_terminal::a_missing_build_is_told_before_a_model_is_fetched",
            ),
        ),
        Part(
            "an endless file as profile or prompts",
            "refused in one line",
            ("hard_terminal::an_endless_file_as_profile_or_prompts_is_one_line",),
        ),
        Part(
            "a profile with relative paths, used from another folder",
            "the same files",
            ("hard_terminal::relative_paths_in_a_profile_are_found_from_any_folder",),
        ),
        Part(
            "prompts that do not fit in the context",
            "all named before anything is measured",
            ("hard_measure::every_prompt_that_does_not_fit_is_named_before_anything_is_measured",),
        ),
        Part(
            "prompts of control characters, or of 100,000 letters",
            "measured, or refused in one line",
            ("hard_measure::odd_prompts_are_measured_or_refused_in_one_line",),
        ),
    ),
    "Odd processors": (
        Part(
            "a build for another processor",
            "refused before it crashes",
            ("builds::a_build_for_another_processor_is_refused_before_it_crashes",),
        ),
        Part("one core", "the bits of several", ("hard_runs::one_core_gives_the_bits_of_several",)),
        Part(
            "64 threads on fewer cores",
            "ends; a width run twice gives the same bits, and the patched build those of the lone token",
            ("hard_runs::64_threads_on_fewer_cores_end_and_the_patched_build_stays_exact",),
        ),
    ),
}


def marks_of(node: ast.expr) -> set[str]:
    """The pytest marks named in a decorator or in ``pytestmark``."""
    return {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr in MARKS}


def tests_of(folder: Path) -> dict[str, set[str]]:
    """``module::name`` of every test function at the top of a test file, with its marks."""
    found: dict[str, set[str]] = {}
    for path in sorted(folder.glob("test_*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        everywhere: set[str] = set()
        for node in body:
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets
            ):
                everywhere = marks_of(node.value)
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                name = f"{path.stem.removeprefix('test_')}::{node.name.removeprefix('test_')}"
                found[name] = everywhere.union(*(marks_of(d) for d in node.decorator_list))
    return found


def unknown(tests: dict[str, set[str]]) -> list[str]:
    """Tests that a case names and that are not there."""
    return [t for parts in CASES.values() for p in parts for t in p.tests if t not in tests]


def page(tests: dict[str, set[str]]) -> str:
    """The text of docs/hard-use.md."""
    parts = [p for some in CASES.values() for p in some]
    held = sum(bool(p.tests) for p in parts)
    rest = (
        ""
        if held == len(parts)
        else 'The rest says "not held by a test": what users should see, and nothing proves it. '
    )
    hard = sum("hard" in marks for marks in tests.values())
    lines = [
        "# Hard use",
        "",
        "What goes wrong on other people's machines, what the user sees then, and the tests that hold it. Written by",
        "`docs/make_hard_use.py`, which fails when a test named here does not exist.",
        "",
        f"{held} of {len(parts)} situations are held by tests. {rest}Marks stand in parentheses",
        "(`slow`, `real_model`, `browser`, `hard`). `make test` runs all but those marked `hard`, which only `make test-hard`",
        f"runs, or runs in more cases: {hard or 'none yet'}.",
    ]
    for number, (title, some) in enumerate(CASES.items(), 1):
        lines += [
            "",
            f"## {number}. {title}",
            "",
            "| what happens | what the user sees | held by |",
            "| --- | --- | --- |",
        ]
        for part in some:
            names = []
            for test in part.tests:
                module, name = test.split("::")
                marks = ", ".join(m for m in MARKS if m in tests[test])
                names.append(f"`test_{module}.py::test_{name}`" + (f" ({marks})" if marks else ""))
            lines.append(f"| {part.what} | {part.seen} | {'<br>'.join(names) or '**not held by a test**'} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` compare; 0 in step or written, 1 out of step or a test that is not there."""
    target, tests = ROOT / "docs" / "hard-use.md", tests_of(ROOT / "tests")
    if missing := unknown(tests):
        print("no such test: " + ", ".join(missing), file=sys.stderr)
        return 1
    text = page(tests)
    if "--check" in arguments:
        if target.is_file() and target.read_text(encoding="utf-8") == text:
            return 0
        print("docs/hard-use.md is out of step with the tests: run python docs/make_hard_use.py", file=sys.stderr)
        return 1
    target.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
