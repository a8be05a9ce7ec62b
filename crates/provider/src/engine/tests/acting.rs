//! Tests that a program that acts between polls never sleeps.

use super::*;

/// Longer than any loop polls without result before it is advised to park.
const LONG: Duration = Duration::from_millis(10);

/// The advice to polls while `act` runs before every second poll.
fn advice_while(party: &mut Party, mut act: impl FnMut(&mut Party)) -> Vec<Advice> {
    let start = Instant::now();
    let mut seen = Vec::new();
    while start.elapsed() < LONG {
        act(party);
        for _ in 0..2 {
            let advice = party.engine.progress();
            party.engine.note_advice_taken(advice, 0);
            seen.push(advice);
        }
    }
    seen
}

#[test]
fn one_that_reads_a_counter_that_waits_for_nothing_never_parks() {
    let mut party = Party::open();
    let advice = advice_while(&mut party, |party| assert!(party.engine.progress_for_counter()));
    assert!(!advice.contains(&Advice::Park));
    // Other tests interrupt this one, which may then look like computing: once it does not.
    until(|| advice_while(&mut party, |_| ()).contains(&Advice::Park));
}

#[test]
fn one_that_posts_operations_never_parks() {
    let mut party = Party::open();
    let myself = party.av.insert(party.name());
    let advice = advice_while(&mut party, |party| {
        let own = SendRequest { notify: false, ..empty_message(myself) };
        party.engine.send(&own).unwrap();
    });
    assert!(!advice.contains(&Advice::Park));
}

#[test]
fn a_counter_of_operations_in_flight_is_waited_for() {
    let (mut one, mut other, number) = linked();
    assert!(one.engine.progress_for_counter());
    one.write(number).unwrap();
    assert!(!one.engine.progress_for_counter());
    until(|| {
        other.engine.progress();
        one.engine.progress();
        one.next().is_some()
    });
    assert!(one.engine.progress_for_counter());
}
