//! The manifests of `deploy/kubernetes` and the images of `deploy/docker`: that Kubernetes would take them, that what they
//! name is there, and that what they start serves, rolled pod by pod, without a stream being lost.

mod binary;
mod edges;
mod images;
mod manifests;
mod node;
mod planted;
mod pod;
mod registry;
mod rollout;
mod rules;
mod serving;

use manifests::{Manifests, OVERLAYS};

/// Fails with all findings, a line each.
fn assert_nothing_found(findings: &[String]) {
    assert!(findings.is_empty(), "\n{}", findings.join("\n"));
}

#[test]
fn every_overlay_is_taken_by_kubernetes_and_fits_together() {
    let mut findings = Vec::new();
    for overlay in OVERLAYS {
        let manifests = Manifests::render(overlay);
        let of_this = [rules::check(&manifests), edges::check(&manifests), binary::check(&manifests)];
        findings.extend(of_this.concat().into_iter().map(|finding| format!("{overlay}: {finding}")));
    }
    assert_nothing_found(&findings);
}

#[test]
fn pools_scale_by_metrics_that_are_made() {
    assert_nothing_found(&rules::scalers(&Manifests::render("autoscale"), &Manifests::render("keda")));
}

#[test]
fn faults_that_are_planted_are_found() {
    assert_nothing_found(&planted::missed(&Manifests::render("base")));
}

#[test]
fn images_hold_what_the_manifests_start() {
    assert_nothing_found(&images::check(&Manifests::render("gpu")));
}
